// The calculator of docs/operate/sizing.md: what a model takes of memory, and how many streams fit.
//
// Everything is computed here, from a config.json; nothing is sent or fetched. What must always hold: the numbers are
// those of the server (`kernels/kv_cache.py`, `kernels/kv_cache_size.py` and the packed weights of `kernels/cpu/`),
// which `tests/e2e/test_sizing_page.py` compares.
"use strict";

const quipuSizing = (() => {
  const GIB = 2 ** 30;
  const ROOM = GIB; // what `quipu models` leaves for the process itself
  const PANEL = 32; // rows that the CPU kernels pack together
  const BYTES = { bfloat16: 2, float16: 2, float32: 4 };
  const GROUPS = { "int4": 32, "int4-g32": 32, "int4-g128": 128 };

  // By architecture: what absent entries stand for, and what the family has beside Llama's matrices.
  const FAMILIES = {
    LlamaForCausalLM: { everyHeadItsKv: true },
    Llama4ForCausalLM: { headDim: 128, llama4: true },
    MistralForCausalLM: {},
    Phi3ForCausalLM: { everyHeadItsKv: true },
    Qwen2ForCausalLM: { qkvBias: true },
    Qwen3ForCausalLM: { headDim: 128, headNorms: true },
    Qwen3MoeForCausalLM: { headNorms: true, experts: true },
    Gemma2ForCausalLM: { headDim: 256, tied: true, norms: 4 },
    Gemma3ForCausalLM: { headDim: 256, tied: true, norms: 4, headNorms: true },
    Gemma3nForCausalLM: { headDim: 256, tied: true, norms: 4, gemma3n: true },
    Gemma4ForCausalLM: { headDim: 256, tied: true, norms: 4, gemma4: true },
    Exaone4ForCausalLM: { headNorms: true },
    Glm4ForCausalLM: { headDim: 128, bias: true, outBias: () => false, norms: 4 },
    GlmForCausalLM: { headDim: 128, bias: true, outBias: () => false },
    GptOssForCausalLM: {
      headDim: 64, bias: true, sinks: true, experts: true, expertFfn: "intermediate_size", expertBias: true,
    },
    GraniteForCausalLM: { everyHeadItsKv: true },
    MinistralForCausalLM: {},
    Ministral3ForCausalLM: { headDim: 128 },
    Olmo2ForCausalLM: { everyHeadItsKv: true, projectionNorms: true },
    Olmo3ForCausalLM: { everyHeadItsKv: true, projectionNorms: true },
    OlmoeForCausalLM: { everyHeadItsKv: true, projectionNorms: true, experts: true, expertFfn: "intermediate_size" },
    Qwen2MoeForCausalLM: { qkvBias: true, experts: true, sharedFfn: "shared_expert_intermediate_size" },
    SeedOssForCausalLM: { headDim: 128, bias: true, outBias: (data) => Boolean(data.attention_out_bias) },
    SmolLM3ForCausalLM: { tied: true },
    Cohere2ForCausalLM: { everyHeadItsKv: true, tied: true, ownHeadDim: true, norms: 1 },
    StableLmForCausalLM: {
      ownHeadDim: true, qkvBiasIf: "use_qkv_bias", normBias: true, norms: (data) => (data.use_parallel_residual ? 1 : 2),
    },
    Starcoder2ForCausalLM: { tied: true, ownHeadDim: true, biasIf: "use_bias", normBias: true, plainMlp: true },
    DeepseekV2ForCausalLM: {
      everyHeadItsKv: true, latent: true, grouped: { shared: 2, dense: 0, ffn: 1407, bias: false },
    },
    DeepseekV3ForCausalLM: {
      everyHeadItsKv: true, latent: true, grouped: { shared: 1, dense: 3, ffn: 2048, bias: true },
    },
    GraniteMoeForCausalLM: { everyHeadItsKv: true, experts: true, expertFfn: "intermediate_size" },
    GraniteMoeHybridForCausalLM: { everyHeadItsKv: true, sharedMlp: true },
    PhimoeForCausalLM: { normBias: true, headBiasIf: "lm_head_bias", experts: true, expertFfn: "intermediate_size" },
    Glm4MoeForCausalLM: {
      outBias: () => false, headNorms: "use_qk_norm", grouped: { shared: 1, dense: 1, ffn: 1408, bias: true },
    },
  };

  const ALSO = { PhiMoEForCausalLM: "PhimoeForCausalLM" }; // other spellings

  // What decodes in models that also read images, of which `text_config` is the configuration.
  const DECODERS = {
    Gemma3ForConditionalGeneration: "Gemma3ForCausalLM", Gemma3nForConditionalGeneration: "Gemma3nForCausalLM",
    Gemma4ForConditionalGeneration: "Gemma4ForCausalLM", Llama4ForConditionalGeneration: "Llama4ForCausalLM",
    Mistral3ForConditionalGeneration: "MistralForCausalLM",
  };
  const BY_TYPE = { ministral3: "Ministral3ForCausalLM" }; // by `model_type` of `text_config`, where there are several

  const MODELS = {
    "Qwen3 0.6B": config("Qwen3", 1024, 3072, 28, 16, 8, 128, 151936, 40960, true),
    "Qwen3 8B": config("Qwen3", 4096, 12288, 36, 32, 8, 128, 151936, 40960, false),
    "Qwen3 30B-A3B": {
      ...config("Qwen3Moe", 2048, 6144, 48, 32, 4, 128, 151936, 40960, false),
      num_experts: 128, num_experts_per_tok: 8, moe_intermediate_size: 768, norm_topk_prob: true,
    },
    "Qwen2.5 7B": config("Qwen2", 3584, 18944, 28, 28, 4, 128, 152064, 32768, false),
    "Llama 3.2 1B": config("Llama", 2048, 8192, 16, 32, 8, 64, 128256, 131072, true),
    "Llama 3.1 8B": config("Llama", 4096, 14336, 32, 32, 8, 128, 128256, 131072, false),
    "Mistral 7B v0.3": { ...config("Mistral", 4096, 14336, 32, 32, 8, 128, 32768, 32768, false), sliding_window: null },
    "Gemma 2 9B": config("Gemma2", 3584, 14336, 42, 16, 8, 256, 256000, 8192, true),
    "Gemma 3 1B": config("Gemma3", 1152, 6912, 26, 4, 1, 256, 262144, 32768, true),
    "Phi-4-mini": config("Phi3", 3072, 8192, 32, 24, 8, 128, 200064, 131072, true),
    "SmolLM3 3B": config("SmolLM3", 2048, 11008, 36, 16, 4, 128, 128256, 65536, true),
    "Granite 3.1 2B": config("Granite", 2048, 8192, 40, 32, 8, 64, 49155, 131072, true),
    "OLMo 3 7B": config("Olmo3", 4096, 11008, 32, 32, 32, 128, 100278, 65536, false),
    "GLM-4-0414 9B": config("Glm4", 4096, 13696, 40, 32, 2, 128, 151552, 32768, false),
    "DeepSeek V2 Lite": {
      ...config("DeepseekV2", 2048, 10944, 27, 16, 16, 64, 102400, 163840, false), q_lora_rank: null, kv_lora_rank: 512,
      qk_nope_head_dim: 128, qk_rope_head_dim: 64, v_head_dim: 128, n_routed_experts: 64, n_shared_experts: 2,
      num_experts_per_tok: 6, moe_intermediate_size: 1408, first_k_dense_replace: 1,
    },
  };

  function config(family, hidden, ffn, layers, heads, kvHeads, headDim, vocab, positions, tied) {
    return {
      architectures: [`${family}ForCausalLM`], hidden_size: hidden, intermediate_size: ffn, num_hidden_layers: layers,
      num_attention_heads: heads, num_key_value_heads: kvHeads, head_dim: headDim, vocab_size: vocab,
      max_position_embeddings: positions, tie_word_embeddings: tied,
    };
  }

  function positive(data, key, otherwise) {
    const value = data[key] ?? otherwise;
    if (!Number.isInteger(value) || value <= 0) throw new Error(`${key} must be a positive integer`);
    return value;
  }

  // Return what of a config.json determines sizes. Throws an Error that names what is missing or not supported.
  function shapeOf(data) {
    const decoder = (data.architectures ?? []).find((one) => Object.hasOwn(DECODERS, one));
    if (decoder !== undefined) {
      const named = BY_TYPE[data.text_config?.model_type] ?? DECODERS[decoder];
      return shapeOf({ ...data.text_config, architectures: [named] });
    }
    const name = (data.architectures ?? []).map((one) => ALSO[one] ?? one).find((one) => Object.hasOwn(FAMILIES, one));
    if (name === undefined) {
      throw new Error(`architectures must have one of ${Object.keys(FAMILIES).join(", ")}`);
    }
    const family = FAMILIES[name];
    const hidden = positive(data, "hidden_size");
    const heads = positive(data, "num_attention_heads");
    const layers = positive(data, "num_hidden_layers");
    const bias = family.biasIf ? Boolean(data[family.biasIf] ?? true) : Boolean(data.attention_bias ?? family.bias);
    const ownHeadDim = Math.floor(hidden / heads);
    const shape = {
      hidden, heads, layers,
      ffn: family.gemma3n ? firstWidth(data) : positive(data, "intermediate_size"),
      vocab: positive(data, "vocab_size"),
      positions: positive(data, "max_position_embeddings"),
      kvHeads: positive(data, "num_key_value_heads", family.everyHeadItsKv ? heads : undefined),
      headDim: family.ownHeadDim ? ownHeadDim : positive(data, "head_dim", family.headDim ?? ownHeadDim),
      tied: data.tie_word_embeddings ?? family.tied ?? false,
      qkvBias: bias || Boolean(family.qkvBias && (data.qkv_bias ?? true)) || Boolean(data[family.qkvBiasIf]),
      oBias: family.outBias ? family.outBias(data) : bias,
      norms: typeof family.norms === "function" ? family.norms(data) : family.norms ?? 2,
      normVectors: family.normBias ? 2 : 1, // a weight, and a bias
      plainMlp: Boolean(family.plainMlp), mlpBias: bias && Boolean(family.plainMlp),
      headNorms: typeof family.headNorms === "string" ? Boolean(data[family.headNorms]) : Boolean(family.headNorms),
      projectionNorms: Boolean(family.projectionNorms),
      headBias: Boolean(data[family.headBiasIf]), sinks: Boolean(family.sinks), expertBias: Boolean(family.expertBias),
      experts: 0, expertFfn: 0, sharedFfn: 0, isDense: () => true,
      own: layers, // layers with keys of their own
    };
    if (family.latent) readLatent(data, shape);
    if (family.gemma3n) readGemma3n(data, shape);
    if (family.gemma4) readGemma4(data, shape);
    if (family.grouped) readGrouped(data, family.grouped, shape);
    if (family.sharedMlp) readShared(data, shape);
    if (family.llama4) readLlama4(data, shape);
    if (family.experts) {
      const step = positive(data, "decoder_sparse_step", 1);
      const dense = new Set(data.mlp_only_layers ?? []);
      shape.experts = positive(data, "num_local_experts" in data ? "num_local_experts" : "num_experts");
      shape.expertFfn = positive(data, family.expertFfn ?? "moe_intermediate_size");
      shape.sharedFfn = family.sharedFfn ? positive(data, family.sharedFfn) : 0;
      shape.isDense = (layer) => dense.has(layer) || (layer + 1) % step !== 0;
    }
    return shape;
  }

  // Add the sizes of latent attention to a shape.
  function readLatent(data, shape) {
    shape.latent = {
      width: positive(data, "kv_lora_rank", 512),
      query: data.q_lora_rank === null ? 0 : positive(data, "q_lora_rank", 1536),
      unrotated: positive(data, "qk_nope_head_dim", 128),
      rotated: positive(data, "qk_rope_head_dim", 64),
      value: positive(data, "v_head_dim", 128),
    };
    shape.kvHeads = 1;
    shape.headDim = shape.latent.rotated + shape.latent.width;
  }

  // Return the width of the first layer's MLP, where each may have its own.
  function firstWidth(data) {
    return positive({ intermediate_size: [data.intermediate_size].flat()[0] }, "intermediate_size");
  }

  // Add what Gemma 3n has beside attention and MLPs: copies of the hidden state, products of low rank, per-layer inputs.
  function readGemma3n(data, shape) {
    shape.own = shape.layers - (data.num_kv_shared_layers ?? 15);
    shape.gemma3n = {
      widths: Array.isArray(data.intermediate_size) ? data.intermediate_size : Array(shape.layers).fill(shape.ffn),
      copies: positive(data, "altup_num_inputs", 4), rank: positive(data, "laurel_rank", 64),
      input: positive(data, "hidden_size_per_layer_input", 256),
      inputVocab: positive(data, "vocab_size_per_layer_input", 262144),
    };
  }

  // Add what the layers of Gemma 4 differ in: heads, keys of their own, and what is beside attention and MLP.
  function readGemma4(data, shape) {
    const types = data.layer_types ?? Array.from({ length: shape.layers }, (_, n) => ((n + 1) % 6 ? "sliding_attention" : ""));
    const input = data.hidden_size_per_layer_input ?? 256;
    const valuesAreKeys = Boolean(data.attention_k_eq_v);
    shape.own = shape.layers - (data.num_kv_shared_layers ?? 0);
    shape.gemma4 = {
      isFull: (layer) => layer === shape.layers - 1 || types[layer] !== "sliding_attention",
      fullKvHeads: valuesAreKeys ? positive(data, "num_global_key_value_heads", shape.kvHeads) : shape.kvHeads,
      fullHeadDim: positive(data, "global_head_dim", 512),
      valuesAreKeys, input, inputVocab: positive(data, "vocab_size_per_layer_input", 262144),
      isWide: Boolean(data.use_double_wide_mlp),
      experts: data.enable_moe_block ? positive(data, "num_experts") : 0,
      expertFfn: data.enable_moe_block ? positive(data, "moe_intermediate_size") : 0,
    };
  }

  // Return the key/value heads of a layer, and their size.
  function headsOf(shape, layer) {
    const { isFull, fullKvHeads, fullHeadDim } = shape.gemma4 ?? { isFull: () => false };
    return isFull(layer) ? [fullKvHeads, fullHeadDim] : [shape.kvHeads, shape.headDim];
  }

  // Add the sizes of an MLP that all tokens have, beside experts or alone.
  function readShared(data, shape) {
    const shared = positive(data, "shared_intermediate_size");
    if (data.num_local_experts === 0) {
      shape.ffn = shared;
      return;
    }
    shape.isUnscored = true;
    shape.experts = positive(data, "num_local_experts" in data ? "num_local_experts" : "num_experts");
    shape.expertFfn = shape.ffn;
    shape.sharedFfn = shared;
    shape.isDense = () => false;
  }

  // Add the sizes of Llama 4's experts, of one that all tokens have, and of dense layers.
  function readLlama4(data, shape) {
    const step = positive(data, "interleave_moe_layer_step", 1);
    const mixed = data.moe_layers && new Set(data.moe_layers);
    shape.isUnscored = true;
    shape.experts = positive(data, "num_local_experts");
    shape.expertFfn = shape.sharedFfn = shape.ffn;
    shape.ffn = positive(data, "intermediate_size_mlp");
    shape.isDense = (layer) => (mixed ? !mixed.has(layer) : (layer + 1) % step !== 0);
  }

  // Add the sizes of experts as DeepSeek names them. `usual` has those of absent entries.
  function readGrouped(data, usual, shape) {
    const dense = data.first_k_dense_replace ?? usual.dense;
    shape.isUnscored = true;
    shape.experts = positive(data, "n_routed_experts");
    shape.expertFfn = positive(data, "moe_intermediate_size", usual.ffn);
    shape.sharedFfn = (data.n_shared_experts ?? usual.shared) * shape.expertFfn;
    shape.choiceBias = usual.bias;
    shape.isDense = (layer) => layer < dense;
  }

  const up = (number, multiple) => Math.ceil(number / multiple) * multiple;

  function matrixBytes(rows, width, dtype, bits, group) {
    const packed = up(rows, PANEL);
    if (bits === 0 || width % group !== 0) {
      return packed * (dtype === "bfloat16" ? up(width, 2) : width) * BYTES[dtype];
    }
    return packed * (up(width, 8) * bits / 8 + width / group * 2); // a scale has two bytes
  }

  // Return the bytes that the weights take once they are loaded by the CPU kernels.
  function weightBytes(shape, dtype, quantization) {
    const isInt8 = quantization === "int8";
    const linear = (rows, width) =>
      quantization === "" ? matrixBytes(rows, width, dtype, 0, 1)
        : matrixBytes(rows, width, dtype, isInt8 ? 8 : 4, isInt8 ? width : GROUPS[quantization]);
    const table = (rows, width) => matrixBytes(rows, width, dtype, quantization === "" ? 0 : 8, width);
    const mlp = (ffn) => linear(shape.plainMlp ? ffn : 2 * ffn, shape.hidden) + linear(shape.hidden, ffn)
      + (shape.mlpBias ? 4 * (ffn + shape.hidden) : 0);
    const plain = (rows, width) => matrixBytes(rows, width, dtype, 0, 1);
    const q = shape.heads * shape.headDim;
    const kv = shape.kvHeads * shape.headDim;
    const vectors = shape.norms * shape.normVectors * shape.hidden + (shape.qkvBias ? q + 2 * kv : 0)
      + (shape.oBias ? shape.hidden : 0)
      + (shape.headNorms ? 2 * shape.headDim : 0) + (shape.projectionNorms ? q + kv : 0)
      + (shape.sinks ? shape.heads : 0)
      + (shape.expertBias ? shape.experts * (1 + 2 * shape.expertFfn + shape.hidden) : 0);
    const attention = shape.latent ? latentBytes(shape, linear, plain)
      : linear(q + 2 * kv, shape.hidden) + linear(shape.hidden, q) + 4 * vectors; // held as float32
    const score = shape.isUnscored ? 0 : plain(1, shape.hidden);
    const shared = shape.sharedFfn ? score + mlp(shape.sharedFfn) : 0;
    const experts = plain(shape.experts, shape.hidden) + (shape.choiceBias ? 4 * shape.experts : 0)
      + shape.experts * mlp(shape.expertFfn) + shared;
    let total = table(shape.vocab, shape.hidden) * (shape.tied ? 1 : 2) + 4 * shape.normVectors * shape.hidden
      + (shape.headBias ? 4 * shape.vocab : 0);
    if (shape.gemma3n) return total + gemma3nBytes(shape, { linear, table, plain, mlp });
    if (shape.gemma4) return total + gemma4Bytes(shape, { linear, table, plain, mlp });
    for (let layer = 0; layer < shape.layers; layer++) {
      total += attention + (shape.isDense(layer) ? mlp(shape.ffn) : experts);
    }
    return total;
  }

  // Return the bytes of all layers of Gemma 3n, of their inputs, and of what makes copies of the hidden state.
  function gemma3nBytes(shape, { linear, table, plain, mlp }) {
    const { hidden, heads, layers, norms, own, kvHeads, headDim } = shape;
    const { widths, copies, rank, input, inputVocab } = shape.gemma3n;
    let total = table(inputVocab, layers * input) + plain(layers * input, hidden) + 4 * input
      + plain((copies - 1) * hidden, hidden) + (copies - 1) * plain(hidden, hidden);
    for (let layer = 0; layer < layers; layer++) {
      const projected = (heads + (layer < own ? 2 * kvHeads : 0)) * headDim;
      const vectors = (norms + 4) * hidden + (layer < own ? 2 : 1) * headDim
        + (shape.qkvBias ? projected : 0) + (shape.oBias ? hidden : 0);
      total += linear(projected, hidden) + linear(hidden, heads * headDim) + 4 * vectors + mlp(widths[layer])
        + plain(copies, hidden) + plain(copies * copies, copies) + plain(copies, copies)
        + plain(rank, hidden) + plain(hidden, rank) + plain(input, hidden) + plain(hidden, input);
    }
    return total;
  }

  // Return the bytes of all layers of Gemma 4, and of their inputs.
  function gemma4Bytes(shape, { linear, table, plain, mlp }) {
    const { hidden, heads, layers, ffn, norms, own } = shape;
    const { isFull, valuesAreKeys, input, inputVocab, isWide, experts, expertFfn } = shape.gemma4;
    let total = input ? table(inputVocab, layers * input) + plain(layers * input, hidden) + 4 * input : 0;
    for (let layer = 0; layer < layers; layer++) {
      const [kvHeads, width] = headsOf(shape, layer);
      const kv = layer < own ? kvHeads * width * (valuesAreKeys && isFull(layer) ? 1 : 2) : 0;
      const projected = heads * width + kv;
      const vectors = norms * hidden + (layer < own ? 2 : 1) * width + 1
        + (shape.qkvBias ? projected : 0) + (shape.oBias ? hidden : 0)
        + (input ? hidden : 0) + (experts ? 4 * hidden + experts : 0);
      total += linear(projected, hidden) + linear(hidden, heads * width) + 4 * vectors
        + mlp(isWide && layer >= own ? 2 * ffn : ffn)
        + (input ? plain(input, hidden) + plain(hidden, input) : 0)
        + plain(experts, hidden) + experts * mlp(expertFfn);
    }
    return total;
  }

  // Return the bytes of a layer's latent attention and norms. What makes keys and values of latents is not quantized.
  function latentBytes(shape, linear, plain) {
    const { width, query, unrotated, rotated, value } = shape.latent;
    const queries = shape.heads * (unrotated + rotated);
    const down = linear((query || queries) + width + rotated, shape.hidden) + (query ? linear(queries, query) : 0);
    const heads = shape.heads * (plain(width, unrotated) + plain(value, width));
    const vectors = shape.norms * shape.hidden + width + query;
    return down + heads + linear(shape.hidden, shape.heads * value) + 4 * vectors;
  }

  // Return the bytes of one KV block: keys and values of all layers. Layers with a window keep all tokens, too.
  function blockBytes(shape, kvDtype, blockSize) {
    const kinds = shape.latent ? 1 : 2; // latents are keys and values
    let total = 0;
    for (let layer = 0; layer < shape.own; layer++) {
      const [kvHeads, width] = headsOf(shape, layer);
      const elements = blockSize * width;
      total += kinds * kvHeads * (kvDtype === "int8" ? up(elements, 4) + 4 * blockSize : elements * BYTES[kvDtype]);
    }
    return total;
  }

  // Format bytes as flags take them, rounded up, as the server does.
  function show(bytes) {
    for (const [unit, size] of [["GiB", GIB], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) {
      if (bytes >= size) return `${(Math.ceil(bytes * 100 / size) / 100).toFixed(2)}${unit}`;
    }
    return String(bytes);
  }

  // Return all numbers for a config.json and what was chosen. Throws an Error that names what cannot be.
  function plan({ data, model, dtype, quantization, kvDtype, blockSize, context, streams, memory }) {
    const shape = shapeOf(data);
    if (!(context >= 1 && streams >= 1 && blockSize >= 1)) throw new Error("every number must be at least 1");
    if (context > shape.positions) throw new Error(`the model has ${shape.positions} positions`);
    const kv = kvDtype === "auto" ? dtype : kvDtype;
    const weights = weightBytes(shape, dtype, quantization);
    const block = blockBytes(shape, kv, blockSize);
    const each = Math.ceil(context / blockSize);
    const blocks = 1 + streams * each; // one is the null block
    const cache = show(blocks * block);
    const left = Math.floor((memory - ROOM - weights) / block);
    const flags = [
      `quipu serve ${model}`, `--max-model-len ${context}`, `--max-num-seqs ${streams}`, `--kv-cache-memory ${cache}`,
      dtype === "bfloat16" ? "" : `--dtype ${dtype}`,
      quantization === "" ? "" : `--quantization ${quantization}`,
      kvDtype === "auto" ? "" : `--kv-cache-dtype ${kvDtype}`,
      blockSize === 16 ? "" : `--block-size ${blockSize}`,
    ];
    return {
      weights, block, tokenBytes: block / blockSize, blocks, cache: blocks * block,
      total: weights + blocks * block + ROOM,
      fit: Math.max(0, Math.floor((left - 1) / each)),
      command: flags.filter(Boolean).join(" "),
    };
  }

  return { FAMILIES, MODELS, shapeOf, weightBytes, blockBytes, show, plan };
})();
