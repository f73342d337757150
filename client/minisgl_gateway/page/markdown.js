// The Markdown that models write, as DOM nodes: paragraphs, headings, lists, code, bold, italics.
// Builds text nodes only; there is no way for a text to become another element or an attribute.

const INLINE = /(?<!`)(`+)(?!`)([^`]|[^`][^]*?[^`])\1(?!`)|\*\*([^*\n]+)\*\*|\*([^*\s][^*\n]*)\*/g;

function make(name, children) {
  const made = document.createElement(name);
  made.append(...children);
  return made;
}

function inline(text) {
  const nodes = [];
  let end = 0;
  for (const match of text.matchAll(INLINE)) {
    const [whole, , code, bold, italic] = match;
    nodes.push(text.slice(end, match.index));
    if (code !== undefined) nodes.push(make("code", [code]));
    else if (bold !== undefined) nodes.push(make("strong", inline(bold)));
    else nodes.push(make("em", inline(italic)));
    end = match.index + whole.length;
  }
  nodes.push(text.slice(end));
  return nodes.filter((node) => node !== "");
}

function list(lines) {
  const ordered = /^\s*\d/.test(lines[0]);
  const items = lines.map((line) => make("li", inline(line.replace(/^\s*(?:[-*+]|\d+[.)])\s+/, ""))));
  const made = make(ordered ? "ol" : "ul", items);
  if (ordered) made.start = parseInt(lines[0], 10);
  return made;
}

function kindOf(line) {
  if (/^\s*(?:[-*+]|\d{1,9}[.)])\s+\S/.test(line)) return /^\s*\d/.test(line) ? "ol" : "ul";
  if (/^#{1,6}\s/.test(line)) return "heading";
  return line.trim() === "" ? "blank" : "text";
}

function block(kind, lines) {
  if (kind === "ol" || kind === "ul") return [list(lines)];
  if (kind === "heading") return lines.map((line) => make("h3", inline(line.replace(/^#+\s+/, ""))));
  return kind === "text" ? [make("p", inline(lines.join("\n")))] : [];
}

export function markdown(text) {
  const nodes = [];
  let kind = "blank";
  let lines = [];
  let fence = null; // the mark that ends the code under way
  const flush = (next) => {
    nodes.push(...block(kind, lines));
    [kind, lines] = [next, []];
  };
  for (const line of text.split("\n")) {
    if (fence !== null) {
      if (line.includes(fence) && /^\s*(?:`+|~+)\s*$/.test(line)) {
        nodes.push(make("pre", [make("code", [lines.join("\n")])]));
        [fence, kind, lines] = [null, "blank", []];
      } else lines.push(line);
      continue;
    }
    const opening = line.match(/^\s*(```+(?!.*`)|~~~+)/);
    if (opening) {
      flush("blank");
      fence = opening[1];
      continue;
    }
    const next = kindOf(line);
    if (next !== kind) flush(next);
    lines.push(line);
  }
  if (fence !== null) nodes.push(make("pre", [make("code", [lines.join("\n")])]));
  else flush("blank");
  return nodes;
}
