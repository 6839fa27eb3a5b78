// The browser of examples. What it shares with other pages is in shared.js, which stands before it.
(() => {
  const { byId, data, make, nodes, named, RIGHT_TO_LEFT, count, fixed, isBlank, visible, leadingSpace } = shared;
  if (!data.examples.length) return;

  const ROW_HEIGHT = 56; // pixels, as .row in style.css
  const SPARE_ROWS = 6; // drawn above and below what is visible
  const SHADES = 5;
  const MOST_OTHERS = 4; // targets named that a chosen token serves, too
  const HASH_DELAY = 400; // ms; browsers refuse more than about 100 changes of the address in 30 seconds
  const [list, rows, detail, tooltip, help] = ['list', 'rows', 'detail', 'tooltip', 'help'].map(byId);
  const fields = Object.fromEntries(['query', 'kind', 'gain-low', 'gain-high', 'sort', 'selector', 'k'].map((id) => [id, byId(id)]));
  const drawn = new Map(); // place in the view -> its row
  const searchable = []; // index of an example -> its text in lower case, made when it is first searched
  const servedBy = []; // number of a selector -> place of a token -> the examples for which it chose that token
  let view = []; // indices of the examples that pass the filters, in their order
  let at = 0; // place in the view of the example that is shown
  let hashTimer = 0;

  // ---------------------------------------------------------------- small helpers
  const percent = (part, whole) => (whole > 0 ? `${fixed((100 * part) / whole, 0)} %`.replace('−0 ', '0 ') : '–');
  const inOneLine = (text) => text.replace(/\s+/g, ' ');
  const example = () => data.examples[view[at]];

  // ---------------------------------------------------------------- filters
  function textOf(index) {
    if (searchable[index] === undefined) {
      const each = data.examples[index];
      searchable[index] = (each.context.join('') + each.target + each.after).toLowerCase();
    }
    return searchable[index];
  }

  const ORDERS = {
    'gain-down': (a, b) => data.examples[b].gain - data.examples[a].gain,
    'gain-up': (a, b) => data.examples[a].gain - data.examples[b].gain,
    document: (a, b) => a - b, // the order in which they were written
  };

  function passes(index) {
    const each = data.examples[index];
    const bound = (id, otherwise) => (Number.isNaN(fields[id].valueAsNumber) ? otherwise : fields[id].valueAsNumber);
    return (fields.kind.value === '' || each.kind === Number(fields.kind.value))
      && each.gain >= bound('gain-low', -Infinity) && each.gain <= bound('gain-high', Infinity)
      && textOf(index).includes(fields.query.value.toLowerCase());
  }

  // Shows what passes the filters; stays at the example ``keep`` (an index) where it still passes.
  function filter(keep = view[at]) {
    view = data.examples.map((_, index) => index).filter(passes).sort(ORDERS[fields.sort.value]);
    byId('count').textContent = `${count(view.length)} of ${count(data.examples.length)} examples`;
    byId('nothing').hidden = view.length > 0;
    byId('example').hidden = view.length === 0;
    byId('place').textContent = '';
    drawn.clear();
    rows.replaceChildren();
    rows.style.height = `${view.length * ROW_HEIGHT}px`;
    list.scrollTop = 0;
    if (view.length) select(Math.max(0, view.indexOf(keep)));
  }

  // ---------------------------------------------------------------- list: only the rows in sight exist
  function makeRow(place) {
    const each = data.examples[view[place]];
    const row = make('div', 'row');
    row.setAttribute('role', 'option');
    row.setAttribute('aria-setsize', view.length);
    row.setAttribute('aria-posinset', place + 1);
    row.style.top = `${place * ROW_HEIGHT}px`;
    row.dataset.place = place;
    const before = inOneLine(each.context.slice(data.n_long - data.n_short).join('')).slice(-24);
    const end = make('span', 'end', `…${before}`);
    end.append(make('b', '', visible(each.target)), ...nodes(inOneLine(each.after)));
    row.append(end, make('span', 'what', `${data.kinds[each.kind]} · document ${each.document}`),
      make('span', 'gain', `+${fixed(each.gain)}`.replace('+−', '−')));
    return row;
  }

  function drawRows() {
    const first = Math.max(0, Math.floor(list.scrollTop / ROW_HEIGHT) - SPARE_ROWS);
    const last = Math.min(view.length, Math.ceil((list.scrollTop + list.clientHeight) / ROW_HEIGHT) + SPARE_ROWS);
    for (const [place, row] of drawn) {
      if ((place < first || place >= last) && place !== at) { // the selected row stays: it may have the focus
        row.remove();
        drawn.delete(place);
      }
    }
    for (const place of [...Array(Math.max(0, last - first)).keys()].map((n) => n + first).concat(view.length ? [at] : [])) {
      if (!drawn.has(place)) drawn.set(place, rows.appendChild(makeRow(place)));
      drawn.get(place).setAttribute('aria-selected', place === at);
      drawn.get(place).tabIndex = place === at ? 0 : -1;
    }
  }

  function select(place) {
    at = place;
    const top = at * ROW_HEIGHT;
    if (top < list.scrollTop) list.scrollTop = top;
    else if (top + ROW_HEIGHT > list.scrollTop + list.clientHeight) list.scrollTop = top + ROW_HEIGHT - list.clientHeight;
    drawRows();
    showExample();
    byId('place').textContent = `${count(at + 1)} of ${count(view.length)}`;
    byId('previous').disabled = at === 0;
    byId('next').disabled = at === view.length - 1;
  }

  function goTo(place, { focus = true } = {}) {
    if (!view.length) return;
    select(Math.min(Math.max(place, 0), view.length - 1));
    if (focus) drawn.get(at).focus({ preventScroll: true });
    const { top, bottom } = detail.getBoundingClientRect();
    if (bottom < 80 || top > window.innerHeight - 80) detail.scrollIntoView();
    rememberInAddress();
  }

  // ---------------------------------------------------------------- one example
  function showExample() {
    const each = example();
    const chosenBy = Number(fields.selector.value);
    const [own, placebo] = each.selections[chosenBy];
    const k = Number(fields.k.value);
    tooltip.hidden = true;
    byId('example-title').replaceChildren('Target ', make('strong', 'target', visible(each.target.trimStart() || each.target)),
      make('span', 'tag', data.kinds[each.kind]));
    showFacts(each);
    showLosses(each, own, placebo, k);
    const strongest = Math.max(0, ...[own, placebo].flatMap(([, influence]) => influence.slice(0, k).map((x) => x ?? 0)));
    byId('legend-shade').hidden = data.units[chosenBy] === '';
    byId('own-title').textContent = `Own text: document ${each.document}`;
    byId('placebo-title').textContent = `Placebo: far text of document ${each.placebo_document}, from token ${count(each.placebo_start)}`;
    showText(byId('text-true'), each, each.context, own, k, strongest, (position) => alsoServes(each, position, chosenBy, k));
    showText(byId('text-placebo'), each, each.placebo, placebo, k, strongest);
  }

  function showFacts(each) {
    const facts = [['document', '', each.document], ['position', '', `token ${count(each.position)}`],
      ['L', 'short', `${fixed(each.short)} nats`], ['L', 'long', `${fixed(each.long)} nats`],
      ['gain', '', `${fixed(each.gain)} nats`]];
    if (data.crossfit) facts.push(['gain of the model that selects', '', `${fixed(each.selecting_gain)} nats`]);
    byId('facts').replaceChildren(...facts.flatMap(([name, below, value]) => {
      const term = make('dt', '', name);
      term.append(make('sub', '', below));
      return [term, make('dd', '', value)];
    }));
  }

  function showLosses(each, own, placebo, k) {
    const body = data.ks.map((value, number) => {
      const row = make('tr', value === k ? 'marked' : '');
      const head = make('th', '', value);
      head.scope = 'row';
      row.append(head, ...[own, placebo].flatMap(([, , loss]) => [
        make('td', '', fixed(loss[number])), make('td', '', percent(each.short - loss[number], each.gain))]));
      return row;
    });
    const table = byId('losses');
    table.caption.textContent = `Loss with the k tokens of ${fields.selector.selectedOptions[0].text} [nats]`;
    table.tBodies[0].replaceChildren(...body);
  }

  const placeOf = (each, position) => `${each.document} ${each.position - each.context.length + position}`;

  // The other examples of its document for which a far token is among the k chosen ones, the strongest first.
  function alsoServes(each, position, chosenBy, k) {
    servedBy[chosenBy] ??= data.examples.reduce((found, other) => {
      const [[positions, influence]] = other.selections[chosenBy];
      positions.forEach((at, rank) => {
        const place = placeOf(other, at);
        found.set(place, [...(found.get(place) ?? []), { other, rank, nats: influence[rank] ?? 0 }]);
      });
      return found;
    }, new Map());
    return (servedBy[chosenBy].get(placeOf(each, position)) ?? [])
      .filter(({ other, rank }) => other !== each && rank < k).sort((a, b) => b.nats - a.nats).map(({ other }) => other);
  }

  // Far context with its chosen tokens marked, then the short window, the target, and what follows.
  function showText(box, each, far, [positions, influence], k, strongest, others = () => []) {
    const rankAt = new Map(positions.slice(0, k).map((position, number) => [position, number]));
    const parts = [];
    let run = '';
    for (let position = 0; position < data.n_long - data.n_short; position += 1) {
      if (rankAt.has(position)) {
        const rank = rankAt.get(position);
        parts.push(...nodes(run + leadingSpace(far[position])), makeChosen(far[position], rank, influence[rank], each.context.length - position, strongest, others(position)));
        run = isBlank(far[position]) ? far[position] : ''; // a box around a line break would be cut in two
      } else run += far[position];
    }
    parts.push(...nodes(run), make('span', 'short', each.context.slice(data.n_long - data.n_short).join('')),
      leadingSpace(each.target), make('strong', 'target', isBlank(each.target) ? visible(each.target) : each.target.trimStart()),
      make('span', 'after', each.after));
    box.replaceChildren(...parts);
    const first = box.querySelector('.chosen');
    if (first) first.tabIndex = 0; // one stop for Tab; arrows go from there
  }

  function makeChosen(piece, rank, influence, distance, strongest, others) {
    const unit = data.units[Number(fields.selector.value)];
    const hasInfluence = unit !== '' && influence !== null;
    const shade = hasInfluence && influence > 0 ? Math.max(1, Math.ceil((SHADES * influence) / strongest)) : 0;
    const token = make('span', `chosen shade${shade}`, piece.trimStart());
    token.classList.toggle('rtl', RIGHT_TO_LEFT.test(piece));
    const said = [`rank ${rank + 1}`, hasInfluence ? `influence ${fixed(influence, 3)} ${unit}` : 'no influence is measured',
      `${count(distance)} tokens before the target`];
    if (others.length) said.push(`also chosen for ${others.slice(0, MOST_OTHERS).map((other) => `“${visible(other.target.trim() || other.target)}”`).join(', ')}${others.length > MOST_OTHERS ? ' …' : ''}`);
    token.dataset.rank = rank + 1 + (isBlank(piece) ? visible(piece) : '');
    token.dataset.tip = named(said.join('\n'));
    token.tabIndex = -1;
    token.setAttribute('role', 'button');
    token.setAttribute('aria-label', named(`chosen token “${visible(piece)}”, ${said.join(', ')}`));
    return token;
  }

  function moveAmongChosen(token, key) {
    const all = [...token.closest('.running').querySelectorAll('.chosen')];
    const place = { Home: 0, End: all.length - 1 }[key] ?? all.indexOf(token) + (key === 'ArrowRight' ? 1 : -1);
    const next = all[Math.min(Math.max(place, 0), all.length - 1)];
    token.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }

  function showTip(token) {
    tooltip.textContent = token.dataset.tip;
    tooltip.hidden = false;
    const around = token.getBoundingClientRect();
    const { width, height } = tooltip.getBoundingClientRect();
    const above = around.top - height - 8;
    tooltip.style.left = `${Math.min(Math.max(4, around.left), document.documentElement.clientWidth - width - 4)}px`;
    tooltip.style.top = `${above > 4 ? above : around.bottom + 8}px`;
  }

  // ---------------------------------------------------------------- address: the example can be linked
  function rememberInAddress() {
    clearTimeout(hashTimer);
    hashTimer = setTimeout(() => {
      const { id } = example() ?? {};
      if (id === undefined) return;
      const what = new URLSearchParams({ target: id, selector: data.selectors[Number(fields.selector.value)], k: fields.k.value });
      history.replaceState(null, '', `#${what}`);
    }, HASH_DELAY);
  }

  // Whether the address names an example; then it is shown, even if the filters leave it out.
  function followAddress() {
    const what = new URLSearchParams(location.hash.slice(1));
    const index = data.examples.findIndex((each) => String(each.id) === what.get('target'));
    const chosenBy = data.selectors.indexOf(what.get('selector'));
    if (index < 0) return false;
    if (chosenBy >= 0) fields.selector.value = chosenBy;
    if (data.ks.includes(Number(what.get('k')))) fields.k.value = what.get('k');
    if (view.length && !passes(index)) byId('filters').reset();
    filter(index);
    return true;
  }

  // ---------------------------------------------------------------- keyboard and pointer
  const LIST_KEYS = {
    ArrowDown: () => at + 1,
    ArrowUp: () => at - 1,
    PageDown: () => at + Math.max(1, Math.floor(list.clientHeight / ROW_HEIGHT) - 1),
    PageUp: () => at - Math.max(1, Math.floor(list.clientHeight / ROW_HEIGHT) - 1),
    Home: () => 0,
    End: () => view.length - 1,
  };
  const STEPS = { j: 1, k: -1, ArrowRight: 1, ArrowLeft: -1 };

  function onKey(event) {
    const { key, target } = event;
    if (event.ctrlKey || event.metaKey || event.altKey || help.open) return;
    if (target.closest('input, select')) {
      if (key === 'Escape' && view.length) drawn.get(at).focus();
      return;
    }
    const token = target.closest('.chosen[data-tip]');
    if (key === '?') help.showModal();
    else if (key === '/') fields.query.select();
    else if (key === 'j' || key === 'k') goTo(at + STEPS[key]);
    else if (key === 'Escape' && (token || !tooltip.hidden)) {
      tooltip.hidden = true;
      if (token && view.length) drawn.get(at).focus({ preventScroll: true });
    } else if (token && ['ArrowRight', 'ArrowLeft', 'Home', 'End'].includes(key)) moveAmongChosen(token, key);
    else if (list.contains(target) && LIST_KEYS[key]) goTo(LIST_KEYS[key]());
    else if (byId('browser').contains(target) && STEPS[key]) goTo(at + STEPS[key]);
    else return;
    event.preventDefault();
  }

  function listen() {
    document.addEventListener('keydown', onKey);
    window.addEventListener('hashchange', followAddress);
    window.addEventListener('resize', drawRows);
    list.addEventListener('scroll', drawRows, { passive: true });
    list.addEventListener('click', ({ target }) => {
      const row = target.closest('.row');
      if (!row) return;
      goTo(Number(row.dataset.place));
      const below = detail.getBoundingClientRect().top >= list.getBoundingClientRect().bottom; // on a narrow screen
      if (below) detail.scrollIntoView();
    });
    byId('previous').addEventListener('click', () => goTo(at - 1, { focus: false }));
    byId('next').addEventListener('click', () => goTo(at + 1, { focus: false }));
    byId('show-help').addEventListener('click', () => help.showModal());
    byId('filters').addEventListener('input', () => filter());
    byId('filters').addEventListener('submit', (event) => event.preventDefault());
    byId('clear').addEventListener('click', () => {
      byId('filters').reset();
      filter();
    });
    for (const id of ['selector', 'k']) {
      fields[id].addEventListener('change', () => {
        if (view.length) showExample();
        rememberInAddress();
      });
    }
    const tipOf = ({ target }) => target.closest?.('.chosen[data-tip]');
    for (const kind of ['pointerover', 'focusin', 'click']) {
      detail.addEventListener(kind, (event) => { if (tipOf(event)) showTip(tipOf(event)); });
    }
    for (const kind of ['pointerout', 'focusout']) detail.addEventListener(kind, () => { tooltip.hidden = true; });
    document.addEventListener('scroll', () => { // which a focus may have caused
      const token = tipOf({ target: document.activeElement });
      if (token && !tooltip.hidden) showTip(token);
      else tooltip.hidden = true;
    }, { passive: true });
  }

  function fillChoices() {
    const option = (value, text) => {
      const element = make('option', '', text);
      element.value = value;
      return element;
    };
    const ofKind = data.kinds.map((_, number) => data.examples.filter((each) => each.kind === number).length);
    fields.kind.append(option('', `all (${count(data.examples.length)})`),
      ...data.kinds.map((kind, number) => option(number, `${kind} (${count(ofKind[number])})`)));
    fields.selector.append(...data.selectors.map((name, number) => option(number, name)));
    fields.k.append(...data.ks.map((k) => option(k, k)));
    fields.selector.value = data.selector;
    fields.k.value = data.k;
    const gains = data.examples.map((each) => each.gain);
    fields['gain-low'].placeholder = fixed(Math.min(...gains));
    fields['gain-high'].placeholder = fixed(Math.max(...gains));
  }

  byId('browser').hidden = false;
  fillChoices();
  listen();
  if (!followAddress()) filter();
})();
