// The page's choice, its measuring and its tokenizer, on what a test hands in.
import fs from 'node:fs';
import path from 'node:path';
import {pathToFileURL} from 'node:url';

const {folder, trees, times, observed = [], texts = []} = JSON.parse(fs.readFileSync(0, 'utf8'));
const load = name => import(pathToFileURL(path.join(folder, name)));
const {Chooser, measure} = await load('choose.js');
const answer = {};
if (trees) {
  const chooser = new Chooser(trees, times);
  answer.first = chooser.current;
  answer.changes = [];
  for (const {tokens, slowness = 1} of observed) {
    const name = chooser.current;
    chooser.observe(name, tokens, times[name].median * slowness);
    if (chooser.current !== name) answer.changes.push(chooser.current);
  }
  answer.speeds = chooser.speeds();
  let clock = 0;
  const calls = {};
  const time = async name => {
    calls[name] = (calls[name] ?? 0) + 1;
    const passed = times[name].median * (calls[name] <= 20 ? 3 : 1);
    clock += passed;
    return passed;
  };
  answer.measured = await measure(time, Object.keys(times), () => {}, () => clock);
}
if (texts.length) {
  const [{TextCoder}, {Tokenizer}] = [await load('tokenizer.js'), await load('vendor/tokenizers/tokenizers.js')];
  const coder = new TextCoder(Tokenizer, JSON.parse(fs.readFileSync(path.join(folder, 'tokenizer.json'), 'utf8')), null);
  answer.texts = texts.map(text => {
    try {
      const ids = coder.encode(text, false), growing = coder.stream();
      return {ids, special: coder.encode(text, true), text: ids.map(id => growing.push(id)).join('')};
    } catch (error) {
      return {error: error.message};
    }
  });
}
console.log(JSON.stringify(answer));
