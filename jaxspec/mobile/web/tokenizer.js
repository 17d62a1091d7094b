// Text to ids and back, by Hugging Face's tokenizers, with two additions: text as it grows, and an
// error where the tokenizer would silently drop characters.

import {UserError} from './engine.js';

const REPLACEMENT = '\ufffd'; // what a decoder writes for bytes that are not a whole character yet

export class TextCoder {
  /**
   * @param Tokenizer the library's class.
   * @param settings contents of tokenizer.json.
   * @param chat texts around messages: {open, reply, turn}, or null.
   */
  constructor(Tokenizer, settings, chat) {
    this.chat = chat;
    this._tokenizer = new Tokenizer(settings, {});
    this._unknown = settings.model.unk_token ?? null;
    this._fine = new Set();
  }

  /** Returns the ids of a text; `special`: with special tokens, such as a first one. */
  encode(text, special) {
    if (/\p{Cs}/u.test(text)) {
      throw new UserError('The text holds half a character (a lone surrogate), which no tokenizer reads: type that place again.');
    }
    const lost = [...new Set(text)].filter(character => !this._knows(character));
    if (lost.length) {
      throw new UserError(`The model's tokenizer has no tokens for ${lost.slice(0, 5).map(each => `"${each}"`).join(', ')}: leave that out.`);
    }
    return this._tokenizer.encode(text, {add_special_tokens: special}).ids;
  }

  /** The text of ids, special ones left out. */
  decode(ids) {
    return ids.length ? this._tokenizer.decode(Array.from(ids), {skip_special_tokens: true}) : '';
  }

  /** Returns the text of one token, special or not. */
  name(id) {
    return this._tokenizer.decode([id], {skip_special_tokens: false});
  }

  stream() {
    return new GrowingText(this);
  }

  _knows(character) {
    if (this._fine.has(character)) return true;
    // White space may be dropped or merged, as tokenizers do on purpose.
    const {ids, tokens} = this._tokenizer.encode(character, {add_special_tokens: false});
    const known = /\s/u.test(character) || (ids.length > 0 && !ids.some(id => id === undefined) && !tokens.includes(this._unknown));
    if (known) this._fine.add(character);
    return known;
  }
}

/** The text of ids that arrive one by one. */
class GrowingText {
  constructor(coder) {
    this._coder = coder;
    this._ids = []; // from the last place where a piece of text ended
    this._shown = '';
  }

  /** Returns the text that one more id adds; nothing until a character is whole. */
  push(id) {
    this._ids.push(id);
    const text = this._coder.decode(this._ids);
    if (text.endsWith(REPLACEMENT) && this._ids.length < 8) return '';
    const piece = text.slice(this._shown.length);
    // One id stays: decoders treat the first of a text in their own way.
    this._ids = [id];
    this._shown = this._coder.decode(this._ids);
    return piece;
  }
}
