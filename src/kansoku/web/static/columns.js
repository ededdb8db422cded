// Fetches columns: "KCOL", header length, JSON header, little-endian arrays.
const KINDS = {
  f4: Float32Array, f8: Float64Array, i4: Int32Array, u4: Uint32Array, i2: Int16Array, u2: Uint16Array,
  i1: Int8Array, u1: Uint8Array,
};

// Numbers from codes of equal steps; the highest code is no data.
function measured(codes, { from, step }) {
  const values = new Float32Array(codes.length);
  for (let n = 0; n < codes.length; n++) values[n] = codes[n] === 65535 ? NaN : from + codes[n] * step;
  return values;
}

export function decode(buffer) {
  const view = new DataView(buffer);
  if (buffer.byteLength < 8 || view.getUint32(0, false) !== 0x4b434f4c) throw new Error("no columns");
  const length = view.getUint32(4, true), start = 8 + length;
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, length)));
  const arrays = {};
  for (const { name, type, shape, offset } of header.arrays) {
    const count = shape.reduce((product, size) => product * size, 1);
    const raw = new KINDS[type](buffer, start + offset, count), code = header.codes?.[name];
    arrays[name] = code ? measured(raw, code) : raw;
    arrays[name].shape = shape;
  }
  return { header, arrays };
}

export async function fetchColumns(address, fresh = false) {
  const answer = await fetch(address, fresh ? { cache: "reload" } : {});
  if (!answer.ok) {
    let text = `${answer.status}`;
    try { text = (await answer.json()).error ?? text; } catch { /* the status says enough */ }
    throw new Error(text);
  }
  return decode(await answer.arrayBuffer());
}
