// A text in which every token can be pointed at: what it needs and what it serves lights up, in the text and in a list.
// Only classes of the tokens that light up change, and nothing of the text moves. Listeners stand on the text, not on
// its tokens. Text of documents enters the page as text nodes only, so nothing in it can become markup. Nothing is
// loaded: the data stand in the page.
'use strict';
(() => {
  const byId = (id) => document.getElementById(id);
  const data = JSON.parse(byId('data').textContent);
  function make(tag, className, ...content) {
    const element = document.createElement(tag);
    element.className = className;
    element.append(...content);
    return element;
  }
  const fixed = (value) => value.toFixed(2).replace('-', '−');
  const signed = (nats) => (nats < 0 ? '' : '+') + fixed(nats);
  const isBlank = (piece) => /^[\s\p{C}\ufe00-\ufe0f]*$/u.test(piece);
  const visible = (piece) => {
    const marked = piece.replaceAll('\n', '↵').replaceAll('\t', '⇥');
    return isBlank(piece) ? marked.replaceAll(' ', '␣') : marked;
  };
  const named = (t) => data.labels[t] ?? visible(data.pieces[t]);
  // in the text a part of a character, or what cannot be seen, is a circle; the list says what it is
  const inText = (t) => (isBlank(data.pieces[t]) && data.labels[t] !== undefined ? '◌' : visible(data.pieces[t]));

  const STEPS = [0, 0.1, 0.3, 1, 3]; // nats above which the next stronger shade begins
  const LISTED = 16;
  const LABELLED = 6; // so many of the strongest have their nats in the text
  const LIT = ['at', 'pinned', 'need', 'serve', 'harm', ...STEPS.map((_, step) => `shade${step + 1}`)];
  const [text, panel] = ['text', 'panel'].map(byId);
  const serves = data.pieces.map(() => []); // the inverse of what is needed
  data.needs.forEach((row, t) => row.forEach(([i, nats]) => serves[i].push([t, nats])));
  serves.forEach((row) => row.sort((a, b) => Math.abs(b[1]) - Math.abs(a[1])));
  const gain = (t) => data.short[t] - data.long[t];
  const tokens = data.pieces.map(makeToken);
  let lit = []; // tokens that are lit up
  let pinned = null; // the one that stays when nothing is pointed at

  function makeToken(piece, t) {
    const start = piece.length - piece.trimStart().length; // the space that a token begins with stays outside its box
    const blank = isBlank(piece);
    const token = make('span', blank ? 'token blank' : 'token', blank ? inText(t) : piece.slice(start));
    token.id = `t${t}`;
    token.dataset.at = t;
    if (gain(t) > data.tau) {
      token.classList.add('over');
      token.tabIndex = 0;
    }
    text.append(blank ? '' : piece.slice(0, start), token, blank ? piece.replaceAll(/[^\n]/g, '') : '');
    return token;
  }

  const shade = (nats) => (nats < 0 ? 'harm' : `shade${Math.max(1, STEPS.filter((step) => nats > step).length)}`);

  function light(t, ...classes) {
    tokens[t].classList.add(...classes);
    lit.push(tokens[t]);
  }

  function show(t) {
    for (const token of lit) {
      token.classList.remove(...LIT);
      delete token.dataset.nats;
    }
    lit = [];
    panel.classList.toggle('empty', t === null);
    if (t === null) return;
    data.needs[t].forEach(([i, nats], rank) => {
      light(i, 'need', shade(nats));
      if (rank < LABELLED) tokens[i].dataset.nats = signed(nats);
    });
    serves[t].forEach(([later, nats]) => light(later, 'serve', ...(nats < 0 ? ['harm'] : [])));
    light(t, 'at', ...(t === pinned ? ['pinned'] : []));
    byId('which').textContent = `${named(t)} at place ${t}`;
    byId('facts').textContent = data.long[t] === null ? 'Its loss was not measured.'
      : `loss ${fixed(data.short[t])} short, ${fixed(data.long[t])} long: gain ${fixed(gain(t))} nats`;
    fill('needs', 'need', data.needs[t], t);
    fill('serves', 'serve', serves[t], t);
  }

  function fill(id, kind, rows, t) {
    byId(id).replaceChildren(...rows.slice(0, LISTED).map(([other, nats]) => {
      const place = make('small', '', `${Math.abs(t - other)} ${other < t ? 'before' : 'behind'}`);
      const looks = kind === 'need' || nats < 0 ? shade(nats) : '';
      const word = make('span', '', named(other));
      const button = make('button', `${kind} ${looks}`, make('b', '', signed(nats)), word, place);
      button.dataset.at = other;
      return make('li', '', button);
    }));
  }

  function pin(t) {
    pinned = t;
    show(t);
  }

  const at = (event) => (event.target.closest?.('[data-at]') ? Number(event.target.closest('[data-at]').dataset.at) : null);
  for (const kind of ['pointerover', 'focusin']) text.addEventListener(kind, (event) => { if (at(event) !== null) show(at(event)); });
  for (const kind of ['pointerleave', 'focusout']) text.addEventListener(kind, () => show(pinned));
  text.addEventListener('click', (event) => pin(at(event) === pinned ? null : at(event)));
  panel.addEventListener('click', (event) => {
    if (at(event) === null) return;
    pin(at(event));
    tokens[pinned].scrollIntoView({ block: 'nearest' });
  });
  document.addEventListener('keydown', (event) => {
    if (event.key === 'Escape') pin(null);
    if (event.key === 'Enter' && text.contains(event.target)) pin(at(event));
  });
})();
