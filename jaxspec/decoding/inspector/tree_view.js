// A draft tree as a picture: the drafted tokens and what became of them.

const SVG = 'http://www.w3.org/2000/svg';

/** Pixels of nodes and of the distances between them; letters of a node; how much a deep tree is drawn smaller before it is scrolled. */
export const SMALL = {width: 72, height: 24, column: 90, row: 32, letters: 8, smallest: 0.85};

export function element(name, attributes, parent) {
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

export function visible(text, letters) {
  const shown = [...text.replaceAll('\n', '\u23ce').replaceAll(' ', '\u00b7').replaceAll('\t', '\u21e5')];
  return shown.length > letters ? `${shown.slice(0, letters - 1).join('')}\u2026` : shown.join('');
}

/**
 * @param parents of all nodes, -1 for the root; parents come first.
 * @param nodes of each: `name`, its text; and, if there are any: `kind`, a class such as
 *   'accepted'; `note`, a second line; `share`, a bar from 0 to 1; `title`, for a pointer.
 * @param label what the picture shows, in words.
 */
export function treePicture(parents, nodes, label, size = SMALL) {
  const {places, rows, columns} = layout(parents);
  const width = (columns - 1) * size.column + size.width + 4, height = (rows - 1) * size.row + size.height + 4;
  const svg = element('svg', {viewBox: `0 0 ${width} ${height}`, class: 'tree', role: 'img', 'aria-label': label});
  svg.style.minWidth = `${size.smallest * width}px`;
  svg.style.maxWidth = `${width}px`;
  const at = node => [2 + places[node][0] * size.column, 2 + places[node][1] * size.row];
  const edges = parents.map((parent, node) => {
    if (parent < 0) return '';
    const [x1, y1] = at(parent), [x2, y2] = at(node), half = size.height / 2;
    const d = `M${x1 + size.width} ${y1 + half}H${(x1 + size.width + x2) / 2}V${y2 + half}H${x2}`;
    return element('path', {d, class: `edge ${nodes[node].kind ?? ''}`});
  });
  svg.append(...edges.filter(edge => edge && !edge.matches('.accepted')), ...edges.filter(edge => edge && edge.matches('.accepted')));
  nodes.forEach(({name, kind, note, share, title}, node) => {
    const [x, y] = at(node), middle = x + size.width / 2;
    const group = element('g', kind ? {class: kind} : {}, svg);
    if (title) element('title', {}, group).textContent = title;
    element('rect', {x, y, width: size.width, height: size.height, rx: 6}, group);
    element('text', {x: middle, y: y + size.height * (note ? 0.33 : 0.5)}, group).textContent = visible(name, size.letters);
    if (note) element('text', {x: middle, y: y + size.height * 0.66, class: 'note'}, group).textContent = note;
    if (share !== undefined) {
      const bar = {x: x + 6, y: y + size.height - 5.5, height: 2.5};
      element('path', {class: 'track', d: `M${bar.x} ${bar.y}h${size.width - 12}v${bar.height}h${12 - size.width}z`}, group);
      element('path', {class: 'share', d: `M${bar.x} ${bar.y}h${(size.width - 12) * share}v${bar.height}h${-(size.width - 12) * share}z`}, group);
    }
  });
  return svg;
}
