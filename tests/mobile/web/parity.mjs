// Decodes with the page's own engine, one thread of wasm: every function over every prompt.
import fs from 'node:fs';
import path from 'node:path';
import {pathToFileURL} from 'node:url';
import {loadLitert} from './litert_node.mjs';

const {folder, prompts, numTokens, switching} = JSON.parse(fs.readFileSync(0, 'utf8'));
const at = name => path.join(folder, name);
const {Decoder, PLAIN, generate, selfTest} = await import(pathToFileURL(at('engine.js')));
const litert = await loadLitert(at('vendor'));
const profile = JSON.parse(fs.readFileSync(at('profile.json'), 'utf8'));
const model = await litert.loadAndCompile(new Uint8Array(fs.readFileSync(at('model.tflite'))), {accelerator: 'wasm'});
const decoder = new Decoder(model, litert.Tensor, profile);
const choices = [PLAIN, ...decoder.trees.keys()];

async function decode(prompt, choose) {
  Object.assign(decoder, {text: [], known: 0});
  await decoder.prefill(prompt);
  const tokens = [], counts = [];
  for await (const step of generate(decoder, {maxTokens: numTokens, stops: [], choose})) {
    tokens.push(...step.tokens);
    counts.push(step.tokens.length);
  }
  return {tokens, counts};
}

const texts = {};
for (const choice of choices) {
  texts[choice] = [];
  for (const prompt of prompts) texts[choice].push(await decode(prompt, () => choice));
}
if (switching) {
  let call = 0;
  texts.switching = [await decode(prompts[0], () => choices[call++ % choices.length])];
}
console.log(JSON.stringify({texts, selfTest: await selfTest(decoder, profile.self_test)}));
