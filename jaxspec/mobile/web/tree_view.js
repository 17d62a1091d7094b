// A draft tree as a picture: the drafted tokens and the accepted path.

const SVG = 'http://www.w3.org/2000/svg';
const WIDTH = 72, HEIGHT = 24, COLUMN = 90, ROW = 32, LETTERS = 8; // pixels
const SMALLEST = 0.85; // of that; a deep tree is scrolled rather than drawn smaller

function element(name, attributes, parent) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  parent?.append(made);
  return made;
}

/** Returns the places of nodes: [column, row], a row for each leaf. */
export function layout(parents) {
  const children = parents.map(() => []);
  parents.forEach((parent, node) => parent >= 0 && children[parent].push(node));
  const places = [];
  let rows = 0;
  const visit = (node, column) => {
    const below = children[node].map(child => visit(child, column + 1));
    const row = below.length ? below[0] : rows++;
    places[node] = [column, row];
    return row;
  };
  visit(0, 0);
  return {places, rows, columns: 1 + Math.max(...places.map(([column]) => column))};
}

export function visible(text) {
  const shown = text.replaceAll('\n', '\u23ce').replaceAll(' ', '\u00b7').replaceAll('\t', '\u21e5');
  return shown.length > LETTERS ? `${shown.slice(0, LETTERS - 1)}\u2026` : shown;
}

/**
 * @param parents of all nodes, -1 for the root.
 * @param names of the drafted tokens, the pending one first.
 * @param path accepted nodes, the root first.
 */
export function treePicture(parents, names, path) {
  const {places, rows, columns} = layout(parents), accepted = new Set(path);
  const width = (columns - 1) * COLUMN + WIDTH + 4, height = (rows - 1) * ROW + HEIGHT + 4;
  const words = path.map(node => names[node]).join('');
  const svg = element('svg', {viewBox: `0 0 ${width} ${height}`, class: 'tree', role: 'img', 'aria-label': `Tree of ${parents.length - 1} drafted tokens, ${path.length - 1} accepted: ${words}`});
  svg.style.minWidth = `${SMALLEST * width}px`;
  svg.style.maxWidth = `${width}px`;
  const at = node => [2 + places[node][0] * COLUMN, 2 + places[node][1] * ROW];
  parents.forEach((parent, node) => {
    if (parent < 0) return;
    const [x1, y1] = at(parent), [x2, y2] = at(node);
    const ends = {x1: x1 + WIDTH, y1: y1 + HEIGHT / 2, x2, y2: y2 + HEIGHT / 2};
    element('line', accepted.has(node) ? {...ends, class: 'accepted'} : ends, svg);
  });
  parents.forEach((_, node) => {
    const [x, y] = at(node);
    const group = element('g', accepted.has(node) ? {class: 'accepted'} : {}, svg);
    element('rect', {x, y, width: WIDTH, height: HEIGHT, rx: 6}, group);
    element('text', {x: x + WIDTH / 2, y: y + HEIGHT / 2}, group).textContent = visible(names[node] ?? '');
  });
  return svg;
}
