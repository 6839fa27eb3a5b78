// A text in which every token can be pointed at: what it needs and what it serves lights up, in the text and in a list.
// Only classes of the tokens that light up change, and nothing of the text moves. Listeners stand on the text, not on
// its tokens. Text of documents enters the page as text nodes only, so nothing in it can become markup. Nothing is
// loaded: the data stand in the page.
'use strict';
(() => {
  const byId = (id) => document.getElementById(id);
  const data = JSON.parse(byId('data').textContent);
  function make(tag, className, text) {
    const element = document.createElement(tag);
    if (className) element.className = className;
    if (text !== undefined) element.append(String(text));
    return element;
  }
  const count = (value) => value.toLocaleString('en');
  const fixed = (value, digits = 2) => value.toFixed(digits).replace('-', '−');
  const isBlank = (piece) => piece.trim() === '';
  const visible = (piece) => {
    if (piece === '') return '◌'; // a token that holds part of a character only
    const marked = piece.replaceAll('\n', '↵').replaceAll('\t', '⇥');
    return isBlank(piece) ? marked.replace(/\s/g, '␣') : marked;
  };
  // The space that a token begins with stays outside its box; what is blank is shown by a sign.
  const leadingSpace = (piece) => (isBlank(piece) ? '' : piece.slice(0, piece.length - piece.trimStart().length));

  const STEPS = [0, 0.1, 0.3, 1, 3]; // nats above which the next stronger shade begins
  const LISTED = 12;
  const LIT = ['at', 'pinned', 'need', 'serve', 'harm', ...STEPS.map((_, step) => `shade${step + 1}`)];
  const [text, panel, said] = ['text', 'panel', 'said'].map(byId);
  const labels = [...byId('labels').children]; // for the nats of what is needed most; they lie over the text
  const serves = data.pieces.map(() => []); // the inverse of what is needed
  data.needs.forEach((row, t) => row.forEach(([i, nats]) => serves[i].push([t, nats])));
  serves.forEach((row) => row.sort((a, b) => Math.abs(b[1]) - Math.abs(a[1])));
  const gain = (t) => data.short[t] - data.long[t];
  const tokens = data.pieces.map(makeToken);
  const marked = tokens.flatMap((token, t) => (token.classList.contains('over') ? [t] : []));
  let lit = []; // tokens that are lit up
  let shown = null; // the token whose needs these are
  let pinned = null; // the one that stays when nothing is pointed at
  let cursor = marked[0] ?? 1; // of the keyboard

  // ---------------------------------------------------------------- text
  function makeToken(piece, t) {
    const lines = piece.split('\n').length - 1;
    const token = make('span', 'token', piece === '' ? visible(piece) : lines && isBlank(piece) ? '↵'.repeat(lines) : isBlank(piece) ? piece : piece.trimStart());
    token.id = `t${t}`;
    token.dataset.at = t;
    token.setAttribute('role', 'option');
    token.setAttribute('aria-selected', false);
    if (isBlank(piece)) token.setAttribute('aria-label', visible(piece));
    token.classList.toggle('blank', lines > 0 && isBlank(piece));
    token.classList.toggle('over', gain(t) > data.tau);
    text.append(...make('span', '', leadingSpace(piece)).childNodes, token, ...(lines && isBlank(piece) ? [piece] : []));
    return token;
  }

  const shade = (nats) => `shade${Math.max(1, STEPS.filter((step) => Math.abs(nats) > step).length)}`;

  function light(index, ...classes) {
    tokens[index].classList.add(...classes);
    lit.push(index);
  }

  function show(t) {
    if (t === shown) return;
    shown = t;
    placeLabels(t === null ? [] : data.needs[t].slice(0, labels.length));
    for (const index of lit) tokens[index].classList.remove(...LIT);
    lit = [];
    if (t !== null) {
      data.needs[t].forEach(([i, nats]) => light(i, 'need', nats < 0 ? 'harm' : shade(nats)));
      serves[t].forEach(([later, nats]) => light(later, 'serve', ...(nats < 0 ? ['harm'] : [])));
      light(t, 'at', ...(t === pinned ? ['pinned'] : []));
    }
    showPanel(t);
  }

  // Above their tokens; of neighbours, every other one below.
  function placeLabels(rows) {
    const origin = byId('labels').getBoundingClientRect();
    const boxes = new Map(rows.map(([i]) => [i, tokens[i].getClientRects()[0]]));
    const below = new Set();
    rows.map(([i]) => i).sort((i, j) => i - j).forEach((i) => { if (boxes.has(i - 1) && !below.has(i - 1)) below.add(i); });
    labels.forEach((label, rank) => {
      label.hidden = rank >= rows.length;
      if (label.hidden) return;
      const [i, nats] = rows[rank];
      const { left, top, bottom } = boxes.get(i);
      label.textContent = signed(nats);
      label.style.transform = `translate(${left - origin.left}px, ${(below.has(i) ? bottom - 1 : top - 9) - origin.top}px)`;
    });
  }

  // ---------------------------------------------------------------- panel
  const signed = (nats) => `${nats < 0 ? '' : '+'}${fixed(nats)}`;
  const quoted = (t) => `“${visible(isBlank(data.pieces[t]) ? data.pieces[t] : data.pieces[t].trim())}”`;

  function showPanel(t) {
    panel.classList.toggle('empty', t === null);
    if (t === null) return;
    byId('which').replaceChildren('Token ', make('strong', '', quoted(t)), make('small', '', `at place ${count(t)}`));
    byId('facts').textContent = data.long[t] === null ? 'Its loss was not measured.'
      : `loss ${fixed(data.short[t])} short, ${fixed(data.long[t])} long: gain ${fixed(gain(t))} nats`;
    fill('needs', data.needs[t], t, 'before');
    fill('serves', serves[t], t, 'behind');
  }

  function fill(id, rows, t, where) {
    byId(`${id}-count`).textContent = rows.length > LISTED ? `the strongest ${LISTED} of ${count(rows.length)}` : '';
    byId(id).replaceChildren(...rows.slice(0, LISTED).map(([other, nats]) => {
      const button = make('button', `quiet ${nats < 0 ? 'harm' : shade(nats)}`);
      button.type = 'button';
      button.dataset.at = other;
      button.append(make('b', '', signed(nats)), make('span', 'word', quoted(other)), make('small', '', `${count(Math.abs(t - other))} ${where}`));
      const item = make('li');
      item.append(button);
      return item;
    }));
    byId(`${id}-none`).hidden = rows.length > 0;
  }

  // For screen readers, where the keyboard went or something was pinned; not for everything that a mouse passes.
  function say(t) {
    const list = (rows) => rows.slice(0, 4).map(([other, nats]) => `${quoted(other)} ${signed(nats)}`).join(', ') || 'nothing measured';
    said.textContent = `${quoted(t)}, gain ${fixed(gain(t))} nats${t === pinned ? ', pinned' : ''}. Needs ${list(data.needs[t])}. Serves ${list(serves[t])}.`;
  }

  // ---------------------------------------------------------------- pointing and keys
  function pin(t) {
    if (pinned !== null) tokens[pinned].setAttribute('aria-selected', false);
    pinned = t;
    if (t !== null) tokens[t].setAttribute('aria-selected', true);
    shown = undefined; // so that the mark of what is pinned is drawn
    show(t);
    if (t !== null) goTo(t);
  }

  function goTo(t) {
    cursor = t;
    text.setAttribute('aria-activedescendant', tokens[t].id);
    say(t);
  }

  function jump(t) {
    goTo(t);
    show(t);
    const { top, bottom } = tokens[t].getBoundingClientRect();
    const free = panel.getBoundingClientRect();
    const lowest = free.left < text.getBoundingClientRect().right ? free.top : window.innerHeight; // a panel below the text
    if (top < 70 || bottom > lowest - 10) tokens[t].scrollIntoView({ block: 'center', behavior: 'instant' });
  }

  const nextMarked = () => marked.find((t) => t > cursor) ?? cursor;
  const lastMarked = () => marked.findLast((t) => t < cursor) ?? cursor;
  const MOVES = { ArrowRight: () => cursor + 1, ArrowLeft: () => cursor - 1, ArrowDown: nextMarked, ArrowUp: lastMarked, Home: () => 0, End: () => tokens.length - 1 };

  function onKey(event) {
    const { key, target } = event;
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (key === 'Escape' && (pinned !== null || shown !== null)) {
      pin(null);
      if (panel.contains(target)) text.focus({ preventScroll: true });
    } else if (target === text && MOVES[key]) jump(Math.min(Math.max(MOVES[key](), 0), tokens.length - 1));
    else if (target === text && (key === 'Enter' || key === ' ')) pin(pinned === cursor ? null : cursor);
    else return;
    event.preventDefault();
  }

  const tokenAt = (event) => event.target.closest('[data-at]');
  text.addEventListener('pointerover', (event) => { if (tokenAt(event)) show(Number(tokenAt(event).dataset.at)); });
  text.addEventListener('pointerleave', () => show(pinned));
  text.addEventListener('click', (event) => {
    const t = tokenAt(event) ? Number(tokenAt(event).dataset.at) : null;
    pin(t === pinned ? null : t);
  });
  panel.addEventListener('click', (event) => {
    const button = tokenAt(event);
    if (!button) return;
    const t = Number(button.dataset.at);
    pin(t);
    jump(t);
    text.focus({ preventScroll: true });
  });
  text.addEventListener('focus', () => { if (text.matches(':focus-visible')) jump(pinned ?? cursor); });
  text.addEventListener('blur', () => show(pinned));
  document.addEventListener('keydown', onKey);
  window.addEventListener('resize', () => { if (shown !== null) placeLabels(data.needs[shown].slice(0, labels.length)); });
  byId('map').hidden = false;
  showPanel(null);
})();
