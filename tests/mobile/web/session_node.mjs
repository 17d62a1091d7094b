// A page's session in Node: what its worker does, without the browser.
import fs from 'node:fs';
import path from 'node:path';
import {pathToFileURL} from 'node:url';
import {loadLitert} from './litert_node.mjs';

export async function openSession(folder) {
  const at = name => path.resolve(folder, name), load = name => import(pathToFileURL(at(name)));
  const [{Session}, {TextCoder}, {Tokenizer}] = await Promise.all(['session.js', 'tokenizer.js', 'vendor/tokenizers/tokenizers.js'].map(load));
  const profile = JSON.parse(fs.readFileSync(at('profile.json'), 'utf8'));
  const coder = new TextCoder(Tokenizer, JSON.parse(fs.readFileSync(at('tokenizer.json'), 'utf8')), profile.chat);
  const litert = await loadLitert(at('vendor'));
  const session = new Session(litert, {...profile, stop_token_ids: []}, coder, 'wasm');
  await session.open(new Uint8Array(fs.readFileSync(at('model.tflite'))));
  return session;
}

export const round = (value, digits = 2) => Number(value.toFixed(digits));

export function median(values) {
  const sorted = [...values].sort((a, b) => a - b), middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}
