// What the pages share: the data, text that cannot become markup, numbers, and the choice of colours. Text of documents
// enters a page as text nodes only, so nothing in it can become markup. Characters that change the direction of writing
// are shown by their names and do nothing. Nothing is loaded: the data stand in the page.
'use strict';
const shared = (() => {
  const byId = (id) => document.getElementById(id);
  const data = JSON.parse(byId('data').textContent);
  function make(tag, className, text) {
    const element = document.createElement(tag);
    if (className) element.className = className;
    if (text !== undefined) element.append(...nodes(String(text)));
    return element;
  }
  const CONTROL = new RegExp(`([${Object.keys(data.controls).join('')}])`);
  const sign = (control) => `‹${data.controls[control]}›`;
  // Text as nodes, in which every control is a sign of its own.
  function nodes(text) {
    return text.split(CONTROL).map((part, number) => (number % 2 ? make('bdi', 'sign', sign(part)) : part));
  }
  const named = (text) => text.split(CONTROL).map((part, number) => (number % 2 ? sign(part) : part)).join('');
  const RIGHT_TO_LEFT = /^\P{L}*[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc]/u; // the first letter is
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

  function chooseColours(choice) {
    const NAME = 'olmo-sparsity colours';
    const set = (value) => { document.documentElement.dataset.theme = value; };
    try { // a browser may forbid storage to files; the choice then lasts for this visit
      choice.value = localStorage.getItem(NAME) ?? '';
    } catch { choice.value = ''; }
    set(choice.value);
    choice.addEventListener('change', () => {
      set(choice.value);
      try { localStorage.setItem(NAME, choice.value); } catch { /* as above */ }
    });
  }

  chooseColours(byId('theme'));
  return { byId, data, make, nodes, named, RIGHT_TO_LEFT, count, fixed, isBlank, visible, leadingSpace };
})();
