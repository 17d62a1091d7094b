// Reads tokenizer.json: byte-level BPE, as Llama 3, Qwen, SmolLM and the shipped models have it, and
// BPE of characters with a fallback to bytes, as Llama 2 and Vicuna.
// Everything in a file or in a text that is not covered raises an `Error`; nothing is guessed.
#pragma once

#include <algorithm>
#include <climits>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// ---- UTF-8 --------------------------------------------------------------------------------------

inline void append_utf8(std::string& text, uint32_t code) {
  if (code < 0x80) {
    text += static_cast<char>(code);
    return;
  }
  int rest = code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;
  text += static_cast<char>((0xFF00 >> (rest + 1) & 0xFF) | code >> 6 * rest);
  while (rest--) text += static_cast<char>(0x80 | (code >> 6 * rest & 0x3F));
}

// Bytes of the character that begins at `at`; 0 if it is not whole, -1 if it is none.
inline int utf8_length(std::string_view text, size_t at) {
  unsigned char first = text[at];
  int length = first < 0x80   ? 1
               : first < 0xC2 ? -1
               : first < 0xE0 ? 2
               : first < 0xF0 ? 3
               : first < 0xF5 ? 4
                              : -1;
  for (int i = 1; i < length; i++) {
    if (at + i >= text.size()) return 0;
    unsigned char next = text[at + i];
    if ((next & 0xC0) != 0x80) return -1;
    // Neither longer than need be, nor half of a surrogate pair, nor above U+10FFFF.
    if (i == 1 && ((first == 0xE0 && next < 0xA0) || (first == 0xED && next >= 0xA0) ||
                   (first == 0xF0 && next < 0x90) || (first == 0xF4 && next >= 0x90)))
      return -1;
  }
  return length;
}

inline std::vector<uint32_t> code_points(std::string_view text) {
  std::vector<uint32_t> found;
  for (size_t at = 0; at < text.size();) {
    int length = utf8_length(text, at);
    if (length < 1) throw Error("text: byte " + std::to_string(at) + " is not valid UTF-8.");
    uint32_t code = static_cast<unsigned char>(text[at]);
    if (length > 1) code &= 0x7F >> length;
    for (int i = 1; i < length; i++) code = code << 6 | (text[at + i] & 0x3F);
    found.push_back(code);
    at += length;
  }
  return found;
}

// ---- JSON ---------------------------------------------------------------------------------------

struct Json {
  enum Kind { Null, Bool, Number, Text, List, Object } kind = Null;
  bool truth = false;
  double number = 0;
  std::string text;
  std::vector<Json> list;
  std::vector<std::pair<std::string, Json>> entries;  // of an object, in the file's order

  const Json* find(std::string_view name) const {
    for (const auto& [key, value] : entries)
      if (key == name) return &value;
    return nullptr;
  }
  const Json& at(std::string_view name, Kind wanted) const {
    const Json* found = find(name);
    if (!found || found->kind != wanted)
      throw Error("\"" + std::string(name) + "\" is missing or of another type.");
    return *found;
  }
  // A text, a number or a truth value of an object; for the whole text: "" if it is not there.
  std::string word(std::string_view name) const {
    const Json* found = find(name);
    return found && found->kind == Text ? found->text : "";
  }
  bool flag(std::string_view name) const {
    const Json* found = find(name);
    return found && found->kind == Bool && found->truth;
  }
  bool empty(std::string_view name) const {  // not there, null, or ""
    const Json* found = find(name);
    return !found || found->kind == Null || (found->kind == Text && found->text.empty());
  }
  int integer() const {
    if (kind != Number || number != static_cast<int>(number))
      throw Error("a whole number is missing.");
    return static_cast<int>(number);
  }
};

class JsonReader {
 public:
  static Json read(std::string_view source) {
    JsonReader reader(source);
    Json value = reader.value(0);
    reader.space();
    if (reader.at_ != source.size()) reader.fail("something follows its end");
    return value;
  }

 private:
  explicit JsonReader(std::string_view source) : source_(source) {}

  [[noreturn]] void fail(const std::string& why) const {
    throw Error("damaged JSON, at byte " + std::to_string(at_) + ": " + why + ".");
  }
  void space() {
    while (at_ < source_.size() &&
           std::string_view(" \t\r\n").find(source_[at_]) != std::string_view::npos)
      at_++;
  }
  bool take(std::string_view word) {
    if (source_.substr(at_, word.size()) != word) return false;
    at_ += word.size();
    return true;
  }
  uint32_t four_digits() {
    uint32_t code = 0;
    for (int i = 0; i < 4; i++, at_++) {
      size_t digit =
          at_ < source_.size()
              ? std::string_view("0123456789abcdef").find(static_cast<char>(source_[at_] | 32))
              : 16;
      if (digit > 15) fail("an escape needs four digits");
      code = code << 4 | static_cast<uint32_t>(digit);
    }
    return code;
  }
  std::string string() {
    std::string text;
    for (at_++; at_ < source_.size() && source_[at_] != '"';) {
      if (source_[at_] != '\\') {
        text += source_[at_++];
        continue;
      }
      char kind = ++at_ < source_.size() ? source_[at_++] : '?';
      size_t simple = std::string_view("\"\\/bfnrt").find(kind);
      if (simple != std::string_view::npos) {
        text += "\"\\/\b\f\n\r\t"[simple];
      } else if (kind == 'u') {
        uint32_t code = four_digits();
        if (code >= 0xD800 && code < 0xE000) {
          const uint32_t second = code < 0xDC00 && take("\\u") ? four_digits() : 0;
          if (second < 0xDC00 || second > 0xDFFF) fail("half a surrogate pair");
          code = 0x10000 + (code - 0xD800) * 0x400 + second - 0xDC00;
        }
        append_utf8(text, code);
      } else {
        fail("an unknown escape");
      }
    }
    if (at_++ >= source_.size()) fail("a text does not end");
    return text;
  }
  Json value(int depth) {
    if (depth > 64) fail("it is nested too deep");
    space();
    Json made;
    char first = at_ < source_.size() ? source_[at_] : '\0';
    if (first == '"') {
      made.kind = Json::Text;
      made.text = string();
    } else if (first == '{' || first == '[') {
      made.kind = first == '{' ? Json::Object : Json::List;
      const char* close = first == '{' ? "}" : "]";
      at_++;
      for (space(); !take(close); space()) {
        if (!(made.list.empty() && made.entries.empty()) && !take(",")) fail("a comma is missing");
        space();
        if (first == '[') {
          made.list.push_back(value(depth + 1));
          continue;
        }
        if (at_ >= source_.size() || source_[at_] != '"') fail("a name is missing");
        std::string name = string();
        space();
        if (!take(":")) fail("a colon is missing");
        made.entries.emplace_back(std::move(name), value(depth + 1));
      }
    } else if (take("true") || take("false")) {
      made.kind = Json::Bool;
      made.truth = first == 't';
    } else if (!take("null")) {
      std::string digits;
      while (at_ < source_.size() &&
             std::string_view("+-.0123456789eE").find(source_[at_]) != std::string_view::npos)
        digits += source_[at_++];
      char* end = nullptr;
      made.kind = Json::Number;
      made.number = std::strtod(digits.c_str(), &end);
      if (digits.empty() || *end) fail("a value is missing");
    }
    return made;
  }

  std::string_view source_;
  size_t at_ = 0;
};

inline std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw Error(path + " cannot be opened.");
  return {std::istreambuf_iterator<char>(file), {}};
}

// ---- characters ---------------------------------------------------------------------------------

// Unicode's letters, numbers and white space below U+0300, and the common punctuation beyond.
// Texts in other scripts need larger tables (ICU has them), so they are refused, not split wrongly.
enum class Kind { Letter, Number, Space, Other };

inline Kind kind_of(uint32_t code) {
  if (code >= '0' && code <= '9') return Kind::Number;
  if ((code | 32) >= 'a' && (code | 32) <= 'z') return Kind::Letter;
  if ((code >= 9 && code <= 13) || code == ' ' || code == 0x85 || code == 0xA0) return Kind::Space;
  if (code < 0xAA) return Kind::Other;
  if (code == 0xB2 || code == 0xB3 || code == 0xB9 || (code >= 0xBC && code <= 0xBE))
    return Kind::Number;
  if (code == 0xAA || code == 0xB5 || code == 0xBA) return Kind::Letter;
  if (code < 0xC0 || code == 0xD7 || code == 0xF7) return Kind::Other;
  if (code <= 0x2C1 || (code >= 0x2C6 && code <= 0x2D1) || (code >= 0x2E0 && code <= 0x2E4) ||
      code == 0x2EC || code == 0x2EE)
    return Kind::Letter;
  bool punctuation =
      (code >= 0x2010 && code <= 0x2027) || (code >= 0x2030 && code <= 0x205E) || code == 0x20AC;
  if (code < 0x300 || punctuation) return Kind::Other;
  std::string character;
  append_utf8(character, code);
  throw Error("text: \"" + character + "\" is beyond the characters that this reader can split.");
}

// ---- the tokenizer ------------------------------------------------------------------------------

class Tokenizer {
 public:
  explicit Tokenizer(const std::string& path) {
    try {
      read(JsonReader::read(read_file(path)));
    } catch (const Error& error) {
      throw Error(path + ": " + error.what());
    }
  }

  // Ids of a text. Special tokens that are spelled in it count as such; with `around`, what the
  // file puts around a text (a first token, for most models) is added.
  std::vector<int> encode(const std::string& text, bool around = true) const {
    std::vector<int> ids;
    if (around) ids = before_;
    std::string rest;
    for (size_t at = 0; at < text.size();) {
      const std::pair<std::string, int>* added = nullptr;
      for (const auto& each : added_)  // the longest first
        if (!added && text.compare(at, each.first.size(), each.first) == 0) added = &each;
      if (!added) {
        rest += text[at++];
        continue;
      }
      encode_plain(rest, ids);
      rest.clear();
      ids.push_back(added->second);
      at += added->first.size();
    }
    encode_plain(rest, ids);
    if (around) ids.insert(ids.end(), after_.begin(), after_.end());
    return ids;
  }

  // Bytes that an id adds to a text; none for special tokens. A character may take several ids.
  // A text by itself begins without the space of its first word, see `begins_with_space`.
  const std::string& bytes(int id) const {
    static const std::string none;
    auto found = bytes_.find(id);
    return found == bytes_.end() ? none : found->second;
  }

  // True if every text is written with a space before it, which reading leaves out.
  bool begins_with_space() const { return characters_; }

 private:
  struct Split {
    enum { Digits, Words } kind;
    int digits = 0;       // most digits of a piece; of Words, 0: any number
    bool modern = false;  // of Words: Llama 3's and Qwen's pattern, not GPT-2's
  };

  static void demand(bool covered, const std::string& what) {
    if (!covered) throw Error(what + " is not covered by this reader.");
  }

  void read(const Json& file) {
    for (int byte = 0, others = 256; byte < 256; byte++) {
      bool printable = (byte >= 33 && byte < 127) || (byte >= 161 && byte < 173) || byte >= 174;
      uint32_t code = printable ? byte : others++;
      append_utf8(spelled_[byte], code);
      byte_of_[code] = byte;
    }
    characters_ = file.at("model", Json::Object).flag("byte_fallback");
    if (characters_) {
      demand_characters(file);
    } else {
      read_bytes(file);
    }
    read_model(file.at("model", Json::Object));
    if (file.find("added_tokens")) read_added(file.at("added_tokens", Json::List));
    if (!file.empty("post_processor")) read_around(file.at("post_processor", Json::Object));
  }

  // Llama 2's: a space before the text, spaces as U+2581, no splits, and the reverse in decoding.
  static void demand_characters(const Json& file) {
    const auto& steps = file.at("normalizer", Json::Object).at("normalizers", Json::List).list;
    demand(steps.size() == 2 && steps[0].word("type") == "Prepend" &&
               steps[0].word("prepend") == SPACE && steps[1].word("type") == "Replace" &&
               steps[1].at("pattern", Json::Object).word("String") == " " &&
               steps[1].word("content") == SPACE,
           "this normalizer next to byte_fallback");
    demand(file.empty("pre_tokenizer"), "a pre_tokenizer next to byte_fallback");
    demand(!file.at("model", Json::Object).flag("ignore_merges"), "ignore_merges next to it");
    std::string decoder;
    for (const Json& step : file.at("decoder", Json::Object).at("decoders", Json::List).list)
      decoder += step.word("type") + " ";
    demand(decoder == "Replace ByteFallback Fuse Strip ", "this decoder next to byte_fallback");
  }

  void read_bytes(const Json& file) {
    if (!file.empty("normalizer")) {
      const Json& normalizer = file.at("normalizer", Json::Object);
      // Composing changes nothing in the characters that `kind_of` covers.
      demand(normalizer.word("type") == "NFC", "normalizer " + normalizer.word("type"));
      composes_ = true;
    }
    read_splits(file.at("pre_tokenizer", Json::Object));
    demand(byte_level_, "a pre_tokenizer without ByteLevel");
    demand(file.at("decoder", Json::Object).word("type") == "ByteLevel", "this decoder");
  }

  void read_splits(const Json& step) {
    const std::string type = step.word("type");
    if (type == "Sequence") {
      for (const Json& each : step.at("pretokenizers", Json::List).list) read_splits(each);
    } else if (type == "Digits") {
      splits_.push_back({Split::Digits, step.flag("individual_digits") ? 1 : INT_MAX, false});
    } else if (type == "ByteLevel") {
      demand(!step.flag("add_prefix_space"), "add_prefix_space");
      byte_level_ = true;
      // Where it is not said, the pattern is used.
      if (!step.find("use_regex") || step.flag("use_regex"))
        splits_.push_back({Split::Words, 0, false});
    } else if (type == "Split") {
      demand(step.word("behavior") == "Isolated" && !step.flag("invert"), "this Split");
      const std::string pattern = step.at("pattern", Json::Object).word("Regex");
      const std::string start = R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N})";
      const std::string end = R"(| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
      const bool three = pattern == start + "{1,3}" + end;
      demand(three || pattern == start + end, "the pattern " + pattern);
      splits_.push_back({Split::Words, three ? 3 : 1, true});
    } else {
      demand(false, "pre_tokenizer " + type);
    }
  }

  void read_model(const Json& model) {
    demand(model.word("type") == "BPE", "model " + model.word("type"));
    for (const char* name : {"dropout", "continuing_subword_prefix", "end_of_word_suffix"})
      demand(model.empty(name), name);
    whole_words_ = model.flag("ignore_merges");
    for (const auto& [piece, id] : model.at("vocab", Json::Object).entries) {
      vocabulary_[piece] = id.integer();
      std::string& bytes = bytes_[id.integer()];
      if (characters_ && piece.size() == 6 && piece.compare(0, 3, "<0x") == 0) {
        bytes = static_cast<char>(std::stoi(piece.substr(3, 2), nullptr, 16));
        continue;
      }
      for (uint32_t code : code_points(piece)) {
        auto found = byte_of_.find(code);
        if (characters_ && code == 0x2581)
          bytes += ' ';
        else if (characters_ || found == byte_of_.end())
          append_utf8(bytes, code);
        else
          bytes += static_cast<char>(found->second);
      }
    }
    int rank = 0;
    for (const Json& merge : model.at("merges", Json::List).list) {
      std::string left, right;
      if (merge.kind == Json::List && merge.list.size() == 2) {
        left = merge.list[0].text, right = merge.list[1].text;
      } else {
        size_t space = merge.text.find(' ');
        if (space == std::string::npos) throw Error("\"merges\" holds what is no pair.");
        left = merge.text.substr(0, space), right = merge.text.substr(space + 1);
      }
      merges_[pair_of(id_of(left), id_of(right))] = {rank++, id_of(left + right)};
    }
  }

  void read_added(const Json& added) {
    for (const Json& token : added.list) {
      for (const char* name : {"lstrip", "rstrip", "single_word"})
        demand(!token.flag(name), std::string("an added token with ") + name);
      demand(!(characters_ && token.flag("normalized")), "an added token that is normalized");
      const std::string& content = token.at("content", Json::Text).text;
      int id = token.at("id", Json::Number).integer();
      if (!content.empty()) added_.emplace_back(content, id);
      bytes_[id] = token.flag("special") ? "" : content;
    }
    std::stable_sort(added_.begin(), added_.end(),
                     [](const auto& a, const auto& b) { return a.first.size() > b.first.size(); });
  }

  void read_around(const Json& step) {
    const std::string type = step.word("type");
    if (type == "Sequence") {
      for (const Json& each : step.at("processors", Json::List).list) read_around(each);
    } else if (type == "TemplateProcessing") {
      bool behind = false;
      for (const Json& part : step.at("single", Json::List).list) {
        if (part.find("Sequence")) {
          behind = true;
          continue;
        }
        const std::string name = part.at("SpecialToken", Json::Object).word("id");
        const Json& token = step.at("special_tokens", Json::Object).at(name, Json::Object);
        for (const Json& id : token.at("ids", Json::List).list)
          (behind ? after_ : before_).push_back(id.integer());
      }
    } else {
      demand(type == "ByteLevel", "post_processor " + type);  // which moves offsets only
    }
  }

  static uint64_t pair_of(int left, int right) {
    return static_cast<uint64_t>(left) << 32 | static_cast<uint32_t>(right);
  }

  int id_of(const std::string& piece) const {
    auto found = vocabulary_.find(piece);
    if (found == vocabulary_.end()) throw Error("the vocabulary lacks \"" + piece + "\".");
    return found->second;
  }

  void encode_characters(const std::string& text, std::vector<int>& ids) const {
    if (text.empty()) return;
    std::vector<int> parts{id_of(SPACE)};
    for (uint32_t code : code_points(text)) {
      std::string character;
      append_utf8(character, code == ' ' ? 0x2581 : code);
      auto known = vocabulary_.find(character);
      if (known != vocabulary_.end()) {
        parts.push_back(known->second);
        continue;
      }
      for (unsigned char byte : character) {
        const char* digits = "0123456789ABCDEF";
        parts.push_back(id_of({'<', '0', 'x', digits[byte >> 4], digits[byte & 15], '>'}));
      }
    }
    merge_parts(parts, ids);
  }

  void encode_plain(const std::string& text, std::vector<int>& ids) const {
    if (characters_) return encode_characters(text, ids);
    std::vector<std::vector<uint32_t>> pieces{code_points(text)};
    if (composes_)
      for (uint32_t code : pieces[0]) kind_of(code);
    for (const Split& split : splits_) {
      std::vector<std::vector<uint32_t>> finer;
      for (const auto& piece : pieces) {
        for (size_t at = 0; at < piece.size();) {
          size_t end = split.kind == Split::Digits ? end_of_digits(piece, at, split)
                                                   : end_of_word(piece, at, split);
          finer.emplace_back(piece.begin() + at, piece.begin() + end);
          at = end;
        }
      }
      pieces = std::move(finer);
    }
    for (const auto& piece : pieces)
      if (!piece.empty()) merge(piece, ids);
  }

  static size_t end_of_digits(const std::vector<uint32_t>& text, size_t at, const Split& split) {
    size_t end = at + 1;
    bool number = kind_of(text[at]) == Kind::Number;
    while (end < text.size() && (kind_of(text[end]) == Kind::Number) == number &&
           (!number || end - at < static_cast<size_t>(split.digits)))
      end++;
    return end;
  }

  // The end of the piece that GPT-2's pattern, or the later one of Llama 3 and Qwen, finds at `at`.
  static size_t end_of_word(const std::vector<uint32_t>& text, size_t at, const Split& split) {
    const size_t size = text.size();
    auto is = [&](size_t place, Kind kind) { return place < size && kind_of(text[place]) == kind; };
    auto all = [&](size_t place, Kind kind, size_t most = SIZE_MAX) {
      size_t end = place;
      while (end - place < most && is(end, kind)) end++;
      return end;
    };
    auto line_end = [&](size_t place) {
      return place < size && (text[place] == '\r' || text[place] == '\n');
    };
    if (text[at] == '\'') {
      for (std::u32string_view ending : {U"s", U"t", U"re", U"ve", U"m", U"ll", U"d"}) {
        size_t same = 0;
        while (same < ending.size() && at + 1 + same < size &&
               letter(text[at + 1 + same], split.modern) == ending[same])
          same++;
        if (same == ending.size()) return at + 1 + same;
      }
    }
    if (split.modern) {
      size_t first = at + (!line_end(at) && !is(at, Kind::Letter) && !is(at, Kind::Number));
      if (is(first, Kind::Letter)) return all(first, Kind::Letter);
      if (is(at, Kind::Number)) return all(at, Kind::Number, split.digits);
    }
    size_t first = at + (text[at] == ' ');
    if (!split.modern)
      for (Kind kind : {Kind::Letter, Kind::Number})
        if (is(first, kind)) return all(first, kind);
    if (is(first, Kind::Other)) {
      size_t end = all(first, Kind::Other);
      while (split.modern && line_end(end)) end++;
      return end;
    }
    size_t end = all(at, Kind::Space);
    if (split.modern)
      for (size_t last = end; last > at; last--)
        if (line_end(last - 1)) return last;
    // White space leaves its last character to the word behind it.
    return end < size && end - at > 1 ? end - 1 : end;
  }

  static uint32_t letter(uint32_t code, bool any_case) {
    if (any_case && code >= 'A' && code <= 'Z') return code | 32;
    return any_case && code == 0x17F ? 's' : code;  // the long s
  }

  void merge(const std::vector<uint32_t>& piece, std::vector<int>& ids) const {
    std::string text;
    for (uint32_t code : piece) append_utf8(text, code);
    std::string whole;
    for (unsigned char byte : text) whole += spelled_[byte];
    auto known = vocabulary_.find(whole);
    if (whole_words_ && known != vocabulary_.end()) {
      ids.push_back(known->second);
      return;
    }
    std::vector<int> parts;
    for (unsigned char byte : text) parts.push_back(id_of(spelled_[byte]));
    merge_parts(parts, ids);
  }

  void merge_parts(std::vector<int>& parts, std::vector<int>& ids) const {
    while (parts.size() > 1) {
      std::pair<int, int> best{INT_MAX, 0};
      size_t place = 0;
      for (size_t at = 0; at + 1 < parts.size(); at++) {
        auto found = merges_.find(pair_of(parts[at], parts[at + 1]));
        if (found != merges_.end() && found->second.first < best.first)
          best = found->second, place = at;
      }
      if (best.first == INT_MAX) break;
      parts[place] = best.second;
      parts.erase(parts.begin() + place + 1);
    }
    ids.insert(ids.end(), parts.begin(), parts.end());
  }

  std::string spelled_[256];  // the character that stands for a byte in the vocabulary
  std::unordered_map<uint32_t, int> byte_of_;
  std::unordered_map<std::string, int> vocabulary_;
  std::unordered_map<int, std::string> bytes_;
  std::unordered_map<uint64_t, std::pair<int, int>> merges_;  // rank, and id of the whole
  std::vector<std::pair<std::string, int>> added_;
  std::vector<Split> splits_;
  std::vector<int> before_, after_;
  bool byte_level_ = false, whole_words_ = false, composes_ = false, characters_ = false;
  static constexpr const char* SPACE = "\u2581";
};
