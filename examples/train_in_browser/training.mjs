// Trains with the files of Trainer.export_training, in Node and in a browser. `ort` is
// onnxruntime-node or onnxruntime-web; `read(name)` gives the bytes of a file of the folder.
//
//   const training = await Training.open(ort, read);
//   const { loss } = await training.step({ input_ids: [[1, 2]], labels: [[1, 2]] }, 1e-3);

const VIEWS = { F64: Float64Array, F32: Float32Array, I64: BigInt64Array, I32: Int32Array,
  I8: Int8Array, U8: Uint8Array, BOOL: Uint8Array };
const TYPES = { F64: "float64", F32: "float32", I64: "int64", I32: "int32", I8: "int8", U8: "uint8",
  BOOL: "bool" };
const LEAVES = { float64: Float64Array, float32: Float32Array, int64: BigInt64Array,
  int32: Int32Array, bool: Uint8Array };

export class Training {
  static async open(ort, read, options = {}) {
    const made = new Training();
    made.ort = ort;
    made.about = JSON.parse(new TextDecoder().decode(await read("training.json")));
    made.state = tensors(ort, await read(made.about.state));
    made.rates = { ...made.about.rates };
    made.microSteps = 0;
    made.sessions = {};
    for (const [name, graph] of Object.entries(made.about.graphs)) {
      made.sessions[name] = await ort.InferenceSession.create(await read(graph.file), options);
    }
    return made;
  }

  // Runs a micro-batch of nested arrays; the last of a window updates.
  async step(batch, lr) {
    if (lr !== undefined) for (const name of this.about.lr) this.rates[name] = lr;
    const last = this.microSteps === this.about.micro_batches - 1;
    const found = await this.run(last ? "train" : "accumulate", batch);
    this.microSteps = last ? 0 : this.microSteps + 1;
    return found;
  }

  evaluate(batch, outputs = []) {
    return this.run("eval", batch, outputs);
  }

  async run(graph, batch, outputs = []) {
    const { ort } = this, about = this.about.graphs[graph], given = { ...this.state };
    for (const [name, rate] of Object.entries(this.rates)) {
      given[name] = new ort.Tensor("float64", Float64Array.of(rate), []);
    }
    // any two words of 32 bits for each window; the Trainer's, as run.py draws them, need blake2b
    if (this.microSteps === 0) this.words = crypto.getRandomValues(new Uint32Array(2));
    const words = this.words;
    given[this.about.seed.input] = new ort.Tensor("int64", BigInt64Array.from(words, BigInt), [2]);
    const sizes = {};
    for (const [name, leaf] of Object.entries(about.batch)) {
      given[leaf.input] = array(ort, name, batch[name], leaf, sizes);
    }
    const results = Object.fromEntries(["loss", "grad_norm", "finite"].filter((key) => about[key])
      .map((key) => [key, about[key]]));
    for (const name of outputs) results[name] = about.outputs[name];
    const session = this.sessions[graph];
    const feeds = Object.fromEntries(session.inputNames.map((name) => [name, given[name]]));
    const wanted = [...Object.values(results), ...Object.values(about.state)];
    const found = await session.run(feeds, wanted);
    for (const [name, after] of Object.entries(about.state)) this.state[name] = found[after];
    return Object.fromEntries(Object.entries(results).map(([key, name]) => {
      const { data, dims } = found[name];
      return [key, dims.length ? { data, dims } : data[0]];
    }));
  }
}

// The tensors of a safetensors file: the length of a header, the header in JSON, bytes.
function tensors(ort, bytes) {
  const held = new Uint8Array(bytes).slice();  // so that views are aligned
  const start = 8 + Number(new DataView(held.buffer).getBigUint64(0, true));
  const header = JSON.parse(new TextDecoder().decode(held.subarray(8, start)));
  return Object.fromEntries(Object.entries(header).map(([name, { dtype, shape, data_offsets }]) => {
    const count = shape.reduce((a, b) => a * b, 1);
    const data = new VIEWS[dtype](held.buffer, start + data_offsets[0], count);
    return [name, new ort.Tensor(TYPES[dtype], data, shape)];
  }));
}

// Nested arrays as a tensor. Throws for a shape that the files are not for.
function array(ort, name, value, leaf, sizes) {
  const dims = [];
  for (let x = value; Array.isArray(x); x = x[0]) dims.push(x.length);
  const fits = dims.length === leaf.shape.length && dims.every((n, i) => {
    const size = leaf.shape[i];
    return typeof size === "number" ? n === size : (sizes[size] ??= n) === n;
  });
  if (!fits) throw new Error(`${name} is [${dims}]; the files are for [${leaf.shape}]`);
  const whole = leaf.dtype === "int64" ? BigInt : Number;
  return new ort.Tensor(leaf.dtype, LEAVES[leaf.dtype].from(value.flat(Infinity), whole), dims);
}
