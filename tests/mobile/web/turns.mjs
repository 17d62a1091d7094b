// Second turns, and perhaps one between that is stopped while it is read: how many tokens each reads.
import fs from 'node:fs';
import {openSession} from './session_node.mjs';

const {folder, texts, choice, numTokens, stopAt} = JSON.parse(fs.readFileSync(0, 'utf8'));
const session = await openSession(folder), {decoder} = session;
const call = decoder._call.bind(decoder);
let read = 0;
decoder._call = async name => {
  if (name.startsWith('prefill_')) read += (await decoder.state.count.data())[0];
  return call(name);
};

async function reply(text, stopped) {
  read = 0;
  const tokens = [];
  let reason = null;
  for await (const step of session.reply(text, {mode: 'text', maxTokens: numTokens, choice, stopped})) {
    tokens.push(...step.tokens);
    reason = step.reason;
  }
  return {tokens, reason, read, length: decoder.text.length};
}

const answer = {first: await reply(texts[0])};
if (texts.length > 2) answer.stopped = await reply(texts[1], () => read >= stopAt);
answer.second = await reply(texts.at(-1));
console.log(JSON.stringify(answer));
