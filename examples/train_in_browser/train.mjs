// node train.mjs <folder of export_training> <batches.json> [lr]: prints the losses as JSON.
import { readFile } from "node:fs/promises";
import { join } from "node:path";
import ort from "onnxruntime-node";
import { Training } from "./training.mjs";

const [folder, batches, lr] = process.argv.slice(2);
const training = await Training.open(ort, (name) => readFile(join(folder, name)));
const losses = [];
for (const batch of JSON.parse(await readFile(batches, "utf8"))) {
  losses.push((await training.step(batch, lr && Number(lr))).loss);
}
console.log(JSON.stringify(losses));
