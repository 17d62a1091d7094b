// Decodes with a file of `jaxspec export`, by whole speculative steps, and prints the text as it
// grows. Greedy, one text at a time, as `jaxspec generate --runtime litert`.
//
//   jaxspec-host MODEL.tflite [--by NAME] [--tokens N] [--threads N] [--weight-cache FILE]
//                [--gpu fp32|fp16] [--ids] [--] PROMPT...

#include <array>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>

#include "litert.h"
#include "tokenizer.h"

namespace {

const std::string kOut = "o_";  // an output o_NAME is the next call's input NAME
const std::string kManifest = "jaxspec_manifest";  // its place in the file; its entry: its format
const int kFormat = 2;

void check(LiteRtStatus status, const std::string& work) {
  if (status) throw Error(work + ": LiteRT answers with status " + std::to_string(status) + ".");
}

// What an app needs of the manifest, which lies in the file itself.
struct Manifest {
  int capacity, num_tokens, depth = 0;
  std::string checksum;
  std::vector<int> stops;

  explicit Manifest(const Json& json) {
    if (json.at(kManifest, Json::Number).integer() != kFormat)
      throw Error("the file was exported by another version of jaxspec: export it again.");
    checksum = json.at("checksum", Json::Text).text;
    capacity = json.at("capacity", Json::Number).integer();
    num_tokens = json.at("num_tokens", Json::Number).integer();
    for (const Json& id : json.at("stop_token_ids", Json::List).list) stops.push_back(id.integer());
    measure(json.at("paths", Json::List));
    for (const auto& tree : json.at("trees", Json::Object).entries) measure(tree.second);
    if (!json.empty("diffusion"))
      throw Error("the model fills in masks, which this program cannot.");
  }

 private:
  void measure(const Json& paths) {
    for (const Json& path : paths.list) depth = std::max(depth, static_cast<int>(path.list.size()));
  }
};

struct Tensor {
  std::string name;
  LiteRtRankedTensorType type;
};

struct Signature {
  size_t index;
  std::vector<Tensor> inputs, outputs;

  bool takes(const std::string& name) const {
    return std::any_of(inputs.begin(), inputs.end(),
                       [&](const Tensor& each) { return each.name == name; });
  }
};

class Buffer {
 public:
  Buffer(LiteRtEnvironment environment, const Tensor& tensor,
         LiteRtTensorBufferRequirements required) {
    check(LiteRtCreateManagedTensorBufferFromRequirements(environment, &tensor.type, required,
                                                          &buffer_),
          tensor.name);
    check(LiteRtGetTensorBufferPackedSize(buffer_, &bytes_), tensor.name);
    fill(nullptr, 0);  // LiteRT does not clear it
  }
  Buffer(const Buffer&) = delete;
  ~Buffer() { LiteRtDestroyTensorBuffer(buffer_); }

  void write(const std::vector<int32_t>& values) {
    fill(values.data(), values.size() * sizeof(int32_t));
  }
  std::vector<int32_t> read() const {
    void* memory;
    check(LiteRtLockTensorBuffer(buffer_, &memory, kLiteRtTensorBufferLockModeRead), "reading");
    std::vector<int32_t> values(bytes_ / sizeof(int32_t));
    std::memcpy(values.data(), memory, bytes_);
    LiteRtUnlockTensorBuffer(buffer_);
    return values;
  }
  LiteRtTensorBuffer handle() const { return buffer_; }

 private:
  void fill(const void* data, size_t size) {
    if (size > bytes_) throw Error("a value is larger than its tensor.");
    void* memory;
    check(LiteRtLockTensorBuffer(buffer_, &memory, kLiteRtTensorBufferLockModeWrite), "writing");
    std::memset(memory, 0, bytes_);
    if (size) std::memcpy(memory, data, size);
    LiteRtUnlockTensorBuffer(buffer_);
  }

  LiteRtTensorBuffer buffer_ = nullptr;
  size_t bytes_ = 0;
};

struct Options {
  std::string model, by, gpu, weight_cache;
  int tokens = 128, threads = 1;
  bool ids = false;
  std::vector<std::string> prompts;
};

class Model {
 public:
  explicit Model(const Options& options) {
    check(LiteRtCreateEnvironment(0, nullptr, &environment_), "the environment");
    check(LiteRtCreateModelFromFile(environment_, options.model.c_str(), &model_), options.model);
    const void* data;
    size_t size;
    if (LiteRtGetModelMetadata(model_, kManifest.c_str(), &data, &size))
      throw Error(options.model + " has no manifest: `jaxspec export` did not make it.");
    std::string_view text(static_cast<const char*>(data), size);
    while (!text.empty() && !text.back()) text.remove_suffix(1);
    manifest_ = std::make_unique<Manifest>(JsonReader::read(text));
    read_signatures();
    compile(options);
  }
  ~Model() {
    buffers_.clear();
    if (compiled_) LiteRtDestroyCompiledModel(compiled_);
    if (model_) LiteRtDestroyModel(model_);
    if (environment_) LiteRtDestroyEnvironment(environment_);
  }

  const Manifest& manifest() const { return *manifest_; }
  const std::map<std::string, Signature>& signatures() const { return signatures_; }

  // N of all prefill_N, ascending.
  std::vector<int> prefill_sizes() const {
    std::vector<int> sizes;
    for (const auto& each : signatures_)
      if (each.first.rfind("prefill_", 0) == 0) sizes.push_back(std::stoi(each.first.substr(8)));
    std::sort(sizes.begin(), sizes.end());
    return sizes;
  }

  // Runs a signature on the state, after some of it is set to new values.
  void call(const std::string& name, const std::map<std::string, std::vector<int32_t>>& values) {
    const Signature& signature = signatures_.at(name);
    std::vector<LiteRtTensorBuffer> inputs, outputs;
    for (size_t at = 0; at < signature.inputs.size(); at++) {
      Buffer& now = *state(signature, at, true)[0];
      auto given = values.find(signature.inputs[at].name);
      if (given != values.end()) now.write(given->second);
      inputs.push_back(now.handle());
    }
    std::vector<Pair*> written;
    for (size_t at = 0; at < signature.outputs.size(); at++) {
      Pair& pair = state(signature, at, false);
      outputs.push_back(pair[1]->handle());
      written.push_back(&pair);
    }
    check(LiteRtRunCompiledModel(compiled_, signature.index, inputs.size(), inputs.data(),
                                 outputs.size(), outputs.data()),
          name);
    for (Pair* pair : written)
      std::swap((*pair)[0], (*pair)[1]);  // buffers take turns; none is copied
  }

  // Returns an output of the last call of a signature.
  std::vector<int32_t> read(const std::string& name, const std::string& output) {
    const Signature& signature = signatures_.at(name);
    for (size_t at = 0; at < signature.outputs.size(); at++)
      if (signature.outputs[at].name == output) return state(signature, at, false)[0]->read();
    throw Error(name + " has no output " + output + ".");
  }

 private:
  using Pair = std::array<std::unique_ptr<Buffer>, 2>;

  void read_signatures() {
    size_t count;
    check(LiteRtGetNumModelSignatures(model_, &count), "signatures");
    for (size_t index = 0; index < count; index++) {
      LiteRtSignature handle;
      const char* key;
      size_t size;
      check(LiteRtGetModelSignature(model_, index, &handle), "a signature");
      check(LiteRtGetSignatureKey(handle, &key), "a signature");
      Signature& signature = signatures_[key];
      signature.index = index;
      for (bool input : {true, false}) {
        check((input ? LiteRtGetNumSignatureInputs : LiteRtGetNumSignatureOutputs)(handle, &size),
              key);
        for (size_t at = 0; at < size; at++) {
          const char* name;
          LiteRtTensor tensor;
          LiteRtRankedTensorType type;
          check((input ? LiteRtGetSignatureInputName : LiteRtGetSignatureOutputName)(handle, at,
                                                                                     &name),
                key);
          check((input ? LiteRtGetSignatureInputTensorByIndex
                       : LiteRtGetSignatureOutputTensorByIndex)(handle, at, &tensor),
                key);
          check(LiteRtGetRankedTensorType(tensor, &type), name);
          (input ? signature.inputs : signature.outputs).push_back({name, type});
        }
      }
    }
  }

  void compile(const Options& options) {
    LiteRtOptions made;
    check(LiteRtCreateOptions(&made), "options");
    const bool gpu = !options.gpu.empty();
    // The GPU alone: with the CPU as well, LiteRT computes there in silence what the GPU refuses.
    check(LiteRtSetOptionsHardwareAccelerators(
              made, gpu ? kLiteRtHwAcceleratorGpu : kLiteRtHwAcceleratorCpu),
          "options");
    // Left to itself the GPU computes in half precision; 1 is fp16, 2 is fp32.
    std::string settings =
        gpu ? std::string("precision = ") + (options.gpu == "fp16" ? "1" : "2") + "\n"
            : "num_threads = " + std::to_string(options.threads) + "\n";
    // Signatures then share one copy of the weights. LiteRT does not check whose they are.
    if (!options.weight_cache.empty())
      settings += "weight_cache_file_path = \"" + options.weight_cache + "-" +
                  manifest_->checksum.substr(0, 16) + "\"\n";
    LiteRtOpaqueOptions opaque;
    check(LiteRtCreateOpaqueOptions(gpu ? "gpu_options" : "xnnpack", strdup(settings.c_str()),
                                    std::free, &opaque),
          "options");
    check(LiteRtAddOpaqueOptions(made, opaque), "options");
    check(LiteRtCreateCompiledModel(environment_, model_, made, &compiled_), "compiling");
    LiteRtDestroyOptions(made);
    bool fully = false;
    check(LiteRtCompiledModelIsFullyAccelerated(compiled_, &fully), "compiling");
    if (gpu && !fully)
      throw Error(
          "--gpu: the accelerator does not take the whole file; export it with --bundle gpu "
          "--check-gpu.");
  }

  // Both buffers of a state, or of an output that no call takes: its value, and the spare one.
  Pair& state(const Signature& signature, size_t at, bool input) {
    const Tensor& tensor = (input ? signature.inputs : signature.outputs)[at];
    // By name and shape, so that signatures share the state that they pass on.
    std::string name = tensor.name;
    if (!input) {
      const bool passed_on = name.rfind(kOut, 0) == 0;
      name = passed_on ? name.substr(kOut.size()) : std::to_string(signature.index) + "/" + name;
    }
    for (unsigned int axis = 0; axis < tensor.type.layout.rank; axis++)
      name += " " + std::to_string(tensor.type.layout.dimensions[axis]);
    Pair& pair = buffers_[name];
    if (!pair[0]) {
      LiteRtTensorBufferRequirements required;
      check((input ? LiteRtGetCompiledModelInputBufferRequirements
                   : LiteRtGetCompiledModelOutputBufferRequirements)(compiled_, signature.index, at,
                                                                     &required),
            name);
      for (auto& buffer : pair) buffer = std::make_unique<Buffer>(environment_, tensor, required);
    }
    return pair;
  }

  LiteRtEnvironment environment_ = nullptr;
  LiteRtModel model_ = nullptr;
  LiteRtCompiledModel compiled_ = nullptr;
  std::unique_ptr<Manifest> manifest_;
  std::map<std::string, Signature> signatures_;
  std::map<std::string, Pair> buffers_;
};

// Prints the text of ids that arrive one by one: characters, as soon as they are whole.
class GrowingText {
 public:
  explicit GrowingText(const Tokenizer& tokenizer) : tokenizer_(tokenizer) {}

  void push(int id) {
    held_ += tokenizer_.bytes(id);
    if (!begun_ && !held_.empty()) {
      if (tokenizer_.begins_with_space() && held_[0] == ' ') held_.erase(0, 1);
      begun_ = true;
    }
    size_t whole = 0;
    while (whole < held_.size()) {
      int length = utf8_length(held_, whole);
      if (length == 0) break;
      whole += std::max(1, length);
    }
    std::fwrite(held_.data(), 1, whole, stdout);
    std::fflush(stdout);
    held_.erase(0, whole);
  }

 private:
  const Tokenizer& tokenizer_;
  std::string held_;
  bool begun_ = false;
};

struct Answer {
  std::vector<int> tokens, counts;  // tokens; and how many each call gave, the bonus included
  double seconds = 0;               // of the calls that decode; the prompt's are left out
};

class Decoder {
 public:
  Decoder(Model& model, const std::string& by) : model_(model), by_(by) {
    if (!model_.signatures().count(by_)) {
      std::string names;
      for (const auto& each : model_.signatures())
        names += (names.empty() ? "" : ", ") + each.first;
      throw Error("--by: this file has " + names + ", not " + by_ + ".");
    }
    const Signature& signature = model_.signatures().at(by_);
    if (signature.takes("threshold"))
      throw Error("--by: this program ends no drafts early; take step instead of " + by_ + ".");
    if (by_ != "decode" &&
        !(by_.rfind("step", 0) == 0 && !signature.takes("window") && !signature.takes("uniforms")))
      throw Error("--by: this program calls decode, step and step_N, not " + by_ + ".");
    rows_ = by_ == "decode" ? 1 : model_.manifest().depth + 1;
  }

  // Continues a prompt; hands every token on as it comes.
  template <class Emit>
  Answer generate(const std::vector<int>& prompt, int most, Emit emit) {
    const Manifest& manifest = model_.manifest();
    Answer answer;
    std::vector<int> text = prompt;
    int room = std::min(most, manifest.capacity - static_cast<int>(prompt.size()));
    bool begun = false, ended = false;
    auto add = [&](const std::vector<int32_t>& tokens) {
      answer.counts.push_back(static_cast<int>(tokens.size()));
      for (int token : tokens) {
        text.push_back(token);
        if (ended) continue;
        answer.tokens.push_back(token);
        emit(token);
        bool stops = std::count(manifest.stops.begin(), manifest.stops.end(), token) > 0;
        ended = stops || static_cast<int>(answer.tokens.size()) == room;
      }
    };
    if (most > 0) add({read_prompt(prompt)});
    auto begin = std::chrono::steady_clock::now();
    while (!ended && most > 0) {
      const int cached = static_cast<int>(text.size()) - 1;
      std::map<std::string, std::vector<int32_t>> values{{"length", {cached}},
                                                         {"pending", {text.back()}}};
      // A step writes a whole padded path. Where that has no room, one token still has.
      if (by_ == "decode" || cached + rows_ > manifest.capacity) {
        model_.call("decode", values);
        add(model_.read("decode", kOut + "pending"));
        continue;
      }
      if (!begun) {  // later steps find these in what the last one wrote
        values["tokens"] = {text.back()};
        values["count"] = {1};
        values["text"] = text;
        begun = true;
      }
      model_.call(by_, values);
      std::vector<int32_t> tokens = model_.read(by_, kOut + "tokens");
      tokens.resize(model_.read(by_, kOut + "count")[0]);
      add(tokens);
    }
    answer.seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    return answer;
  }

 private:
  // Reads a prompt in parts of the sizes that the file has; returns the token after it.
  int32_t read_prompt(const std::vector<int>& prompt) {
    const Manifest& manifest = model_.manifest();
    const int length = static_cast<int>(prompt.size());
    if (length < 1 || length >= manifest.capacity)
      throw Error("PROMPT: this file takes 1 to " + std::to_string(manifest.capacity - 1) +
                  " tokens, got " + std::to_string(length) + ".");
    for (int id : prompt)
      if (id < 0 || id >= manifest.num_tokens)
        throw Error("PROMPT: the model does not know the id " + std::to_string(id) + ".");
    const std::vector<int> sizes = model_.prefill_sizes();
    if (sizes.empty()) throw Error("the file has no prefill_N.");
    std::string last;
    for (int at = 0; at < length;) {
      auto fitting =
          std::find_if(sizes.begin(), sizes.end(), [&](int each) { return each >= length - at; });
      const int size = fitting == sizes.end() ? sizes.back() : *fitting;
      // The last part may overlap what was read: reading a token again changes nothing.
      const int first = std::max(0, std::min(at, manifest.capacity - size));
      const int end = std::min(first + size, length);
      last = "prefill_" + std::to_string(size);
      model_.call(last,
                  {
                      {"prompt", {prompt.begin() + first, prompt.begin() + end}},
                      {"count", {end - first}},
                      {"length", {first}},
                      {"following",
                       {end < length ? prompt[end] : 0}},  // only files with an EAGLE head take it
                  });
      at = first + size;
    }
    return model_.read(last, kOut + "pending")[0];
  }

  Model& model_;
  const std::string by_;
  int rows_;
};

int whole_number(const std::string& flag, const std::string& value) {
  char* end = nullptr;
  long number = std::strtol(value.c_str(), &end, 10);
  if (value.empty() || *end || number < 1 || number > 1 << 20)
    throw Error(flag + " must be a whole number from 1 on, got \"" + value + "\".");
  return static_cast<int>(number);
}

Options read_options(int count, char** words) {
  Options options;
  bool only_words = false;  // behind "--"
  for (int at = 1; at < count; at++) {
    const std::string word = words[at];
    if (only_words) {
      options.prompts.push_back(word);
    } else if (word == "--") {
      only_words = true;
    } else if (word == "--ids") {
      options.ids = true;
    } else if (word.rfind("--", 0) == 0) {
      if (at + 1 == count) throw Error(word + " needs a value.");
      const std::string value = words[++at];
      if (word == "--by")
        options.by = value;
      else if (word == "--tokens")
        options.tokens = whole_number(word, value);
      else if (word == "--threads")
        options.threads = whole_number(word, value);
      else if (word == "--weight-cache" && value.find_first_of("\"\\\n") == std::string::npos)
        options.weight_cache = value;
      else if (word == "--gpu" && (value == "fp32" || value == "fp16"))
        options.gpu = value;
      else
        throw Error(word + " " + value + " is not known.");
    } else if (options.model.empty()) {
      options.model = word;
    } else {
      options.prompts.push_back(word);
    }
  }
  if (options.prompts.empty())
    throw Error(
        "usage: jaxspec-host MODEL.tflite [--by NAME] [--tokens N] [--threads N] "
        "[--weight-cache FILE] [--gpu fp32|fp16] [--ids] [--] PROMPT...");
  if (!options.gpu.empty() && !options.weight_cache.empty())
    throw Error("--weight-cache: is for the CPU; leave it out, or leave out --gpu.");
  return options;
}

std::string join(const std::vector<int>& numbers) {
  std::string text;
  for (int each : numbers) text += (text.empty() ? "" : ",") + std::to_string(each);
  return "[" + text + "]";
}

int run(int count, char** words) {
  Options options = read_options(count, words);
  const size_t slash = options.model.rfind('/');
  const Tokenizer tokenizer((slash == std::string::npos ? "" : options.model.substr(0, slash + 1)) +
                            "tokenizer.json");
  Model model(options);
  if (options.by.empty()) {
    std::string several;
    for (const auto& each : model.signatures())
      if (each.first.rfind("step_", 0) == 0 && each.second.takes("tokens"))
        several += " " + each.first;
    if (model.signatures().count("step"))
      options.by = "step";
    else if (several.empty())
      options.by = "decode";
    else
      throw Error("--by: this file has a step for each of several trees: name one of" + several +
                  ".");
  }
  Decoder decoder(model, options.by);
  for (const std::string& prompt : options.prompts) {
    GrowingText text(tokenizer);
    const std::vector<int> ids = tokenizer.encode(prompt);
    const Answer answer = decoder.generate(ids, options.tokens, [&](int token) {
      if (!options.ids) text.push(token);
    });
    if (options.ids)
      std::printf("{\"prompt\":%s,\"tokens\":%s,\"counts\":%s}\n", join(ids).c_str(),
                  join(answer.tokens).c_str(), join(answer.counts).c_str());
    else
      std::printf("\n");
    const double calls = static_cast<double>(answer.counts.size()) - 1,
                 tokens = static_cast<double>(answer.tokens.size()) - 1;
    std::fprintf(stderr, "%s: %.0f tokens in %.0f calls, %.1f tokens/s\n", options.by.c_str(),
                 tokens, calls, answer.seconds > 0 ? tokens / answer.seconds : 0);
  }
  return 0;
}

}  // namespace

int main(int count, char** words) {
  try {
    return run(count, words);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "jaxspec-host: error: %s\n", error.what());
    return 2;
  }
}
