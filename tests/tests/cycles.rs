//! Cycles between files: files of a crate may know each other in pairs, as a module and its parts do, and never in longer cycles, neither by
//! imports nor by the calls between the methods of one type that several files define.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

/// Source folders of the workspace's crates: every `src` beside a `Cargo.toml`.
fn crates(folder: &Path, found: &mut Vec<PathBuf>) -> Result<()> {
    if folder.join("Cargo.toml").exists() && folder.join("src").is_dir() {
        found.push(folder.join("src"));
    }
    for entry in fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let entry = entry?;
        let name = entry.file_name();
        if entry.file_type()?.is_dir()
            && name != "target"
            && name != "src"
            && !name.to_string_lossy().starts_with('.')
        {
            crates(&entry.path(), found)?;
        }
    }
    Ok(())
}

/// Files of a crate by module path; the root is the empty path.
fn modules(src: &Path) -> Result<BTreeMap<Vec<String>, String>> {
    let mut found = BTreeMap::new();
    let mut folders = vec![src.to_path_buf()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder)? {
            let path = entry?.path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            if path.extension().is_none_or(|extension| extension != "rs") {
                continue;
            }
            let relative = path.strip_prefix(src)?.with_extension("");
            let mut module: Vec<String> =
                relative.components().map(|part| part.as_os_str().to_string_lossy().into_owned()).collect();
            if module
                .last()
                .is_some_and(|last| last == "mod" || (module.len() == 1 && (last == "lib" || last == "main")))
            {
                module.pop();
            }
            let text = fs::read_to_string(&path)?;
            // Tests may import what they like.
            let code = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default().to_owned();
            found.insert(module, code);
        }
    }
    Ok(found)
}

/// Paths of a `use` tree: `a::{b, c::d}` is `a::b` and `a::c::d`.
fn flatten(tree: &str) -> Vec<Vec<String>> {
    let tree = tree.trim();
    let Some(open) = tree.find('{') else {
        let path = tree.split(" as ").next().unwrap_or_default();
        return vec![path.split("::").map(|part| part.trim().to_owned()).collect()];
    };
    let prefix: Vec<String> =
        tree[..open].split("::").map(|part| part.trim().to_owned()).filter(|part| !part.is_empty()).collect();
    let inner = tree[open + 1..].trim_end().trim_end_matches('}');
    let (mut depth, mut start, mut parts) = (0, 0, Vec::new());
    for (at, character) in inner.char_indices() {
        match character {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                parts.push(&inner[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    parts.push(&inner[start..]);
    let parts = parts.into_iter().filter(|part| !part.trim().is_empty());
    parts.flat_map(flatten).map(|path| prefix.iter().cloned().chain(path).collect()).collect()
}

/// Paths that a file imports by `use`, with `pub use` marked.
fn uses(code: &str) -> Vec<(bool, Vec<String>)> {
    let mut found = Vec::new();
    for statement in code.split(';') {
        let Some(line) = statement.lines().position(|line| {
            let line = line.trim_start();
            line.starts_with("use ")
                || (line.starts_with("pub") && line.contains(" use ") && !line.contains("//"))
        }) else {
            continue;
        };
        let text: String = statement.lines().skip(line).collect::<Vec<_>>().join(" ");
        let Some((visibility, tree)) = text.trim_start().split_once("use ") else { continue };
        found.extend(flatten(tree).into_iter().map(|path| (!visibility.is_empty(), path)));
    }
    found
}

/// Paths from `crate::` or `super::` that a file names outside of `use` statements and comments.
fn inline_paths(code: &str) -> Vec<Vec<String>> {
    let mut found = Vec::new();
    for line in code.lines().map(str::trim_start) {
        let is_use = line.starts_with("use ") || (line.starts_with("pub") && line.contains(" use "));
        if is_use || line.starts_with("//") {
            continue;
        }
        let words = line.split(|character: char| !(character.is_alphanumeric() || "_:".contains(character)));
        let paths = words.filter(|word| word.starts_with("crate::") || word.starts_with("super::"));
        found.extend(paths.map(|path| path.split("::").map(str::to_owned).collect()));
    }
    found
}

/// Module in which `path`, as written in `module`, is defined: re-exports are followed.
fn resolve(
    module: &[String],
    path: &[String],
    modules: &BTreeMap<Vec<String>, String>,
    depth: usize,
) -> Option<Vec<String>> {
    let mut base: Vec<String> = module.to_vec();
    let mut rest = path;
    match rest.first()?.as_str() {
        "crate" => {
            base.clear();
            rest = &rest[1..];
        }
        "super" => {
            while rest.first().is_some_and(|part| part == "super") {
                base.pop()?;
                rest = &rest[1..];
            }
        }
        "self" => rest = &rest[1..],
        first if modules.contains_key(&[module, &[first.to_owned()]].concat()) => {}
        _ => return None,
    }
    while let Some(first) = rest.first() {
        base.push(first.clone());
        if !modules.contains_key(&base) {
            base.pop();
            break;
        }
        rest = &rest[1..];
    }
    let Some(item) = rest.first().filter(|_| depth < 8) else { return Some(base) };
    let reexport =
        uses(modules.get(&base)?).into_iter().find(|(public, path)| *public && path.last() == Some(item));
    match reexport {
        Some((_, path)) => resolve(&base, &path, modules, depth + 1).or(Some(base)),
        None => Some(base),
    }
}

/// Shortest cycle through `from` -> `to` with more than two modules.
fn cycle<'a>(
    from: &'a Vec<String>,
    to: &'a Vec<String>,
    edges: &'a BTreeMap<Vec<String>, BTreeSet<Vec<String>>>,
) -> Option<Vec<&'a Vec<String>>> {
    let mut came_from: BTreeMap<&Vec<String>, &Vec<String>> = BTreeMap::new();
    let mut next = VecDeque::from([to]);
    while let Some(module) = next.pop_front() {
        for other in edges.get(module).into_iter().flatten() {
            // The direct way back is a pair, which is allowed.
            if (module == to && other == from) || other == to || came_from.contains_key(other) {
                continue;
            }
            came_from.insert(other, module);
            if other == from {
                let mut path = vec![from];
                let mut at = from;
                while at != to {
                    at = came_from.get(at)?;
                    path.push(at);
                }
                return Some(path);
            }
            next.push_back(other);
        }
    }
    None
}

type Graph = BTreeMap<Vec<String>, BTreeSet<Vec<String>>>;

/// Returns the cycles of more than two files, each in order of its names.
fn long_cycles(edges: &Graph) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for (from, others) in edges {
        for to in others {
            if let Some(mut path) = cycle(from, to, edges) {
                path.sort();
                let names: Vec<String> = path.iter().map(|module| module.join("::")).collect();
                found.insert(names.join(", "));
            }
        }
    }
    found
}

/// Bodies of the inherent implementations in a file, by type.
fn implementations(code: &str) -> Vec<(&str, &str)> {
    let mut found = Vec::new();
    for (at, _) in code.match_indices("\nimpl") {
        let rest = &code[at + "\nimpl".len()..];
        let Some((head, body)) = rest.split_once('{') else { continue };
        let name = match head.strip_prefix('<') {
            // Its generic parameters; none of ours nest deeper.
            Some(generic) => generic.split_once("> ").map_or("", |(_, name)| name),
            None => head,
        };
        let name = name.trim();
        if !name.contains(" for ") {
            let name = name.split(|character: char| !character.is_alphanumeric()).next().unwrap_or_default();
            found.push((name, body.split("\n}\n").next().unwrap_or_default()));
        }
    }
    found
}

/// Names in `code` that follow `before` and precede `after`.
fn names_between<'a>(code: &'a str, before: &'a str, after: &'a [char]) -> impl Iterator<Item = &'a str> {
    code.match_indices(before).filter_map(move |(at, _)| {
        let rest = &code[at + before.len()..];
        let end = rest.find(|character: char| !character.is_alphanumeric() && character != '_')?;
        rest[end..].starts_with(after).then(|| &rest[..end])
    })
}

/// Calls between files by methods of one type on itself: for each type that several files implement, which file calls which.
fn method_calls(modules: &BTreeMap<Vec<String>, String>) -> BTreeMap<String, Graph> {
    let mut types: BTreeMap<&str, BTreeMap<&Vec<String>, Vec<&str>>> = BTreeMap::new();
    for (module, code) in modules {
        for (name, body) in implementations(code) {
            types.entry(name).or_default().entry(module).or_default().push(body);
        }
    }
    let mut calls = BTreeMap::new();
    for (name, files) in types.into_iter().filter(|(_, files)| files.len() > 1) {
        let defined = |bodies: &[&str]| -> BTreeSet<String> {
            bodies
                .iter()
                .flat_map(|body| names_between(body, "fn ", &['(', '<']))
                .map(str::to_owned)
                .collect()
        };
        let defined: BTreeMap<&Vec<String>, BTreeSet<String>> =
            files.iter().map(|(module, bodies)| (*module, defined(bodies))).collect();
        let graph: Graph = files
            .iter()
            .map(|(module, bodies)| {
                let called = bodies.iter().flat_map(|body| {
                    names_between(body, "self.", &['(']).chain(names_between(body, "Self::", &['(']))
                });
                let others = called.filter(|method| !defined[module].contains(*method)).flat_map(|method| {
                    defined
                        .iter()
                        .filter(move |(_, methods)| methods.contains(method))
                        .map(|(other, _)| *other)
                });
                ((*module).clone(), others.cloned().collect())
            })
            .collect();
        calls.insert(name.to_owned(), graph);
    }
    calls
}

/// Source folders of all crates of the workspace.
fn workspace() -> Result<Vec<PathBuf>> {
    let root =
        Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().find(|folder| folder.join("Cargo.lock").exists());
    let mut found = Vec::new();
    crates(root.context("no workspace above the tests")?, &mut found)?;
    ensure!(found.len() > 10, "the workspace has more crates than {found:?}");
    Ok(found)
}

#[test]
fn files_of_one_type_call_each_other_in_pairs_at_most() -> Result<()> {
    let file = |name: &str, code: &str| (vec![name.to_owned()], format!("\n{code}\n}}\n"));
    let circle = BTreeMap::from([
        file("a", "impl Type {\n    fn one(&self) {\n        self.two();\n    }"),
        file("b", "impl Type {\n    fn two(&self) {\n        Self::three(self);\n    }"),
        file("c", "impl<'a> Type<'a> {\n    fn three<T>(&self) {\n        self.one()\n    }"),
    ]);
    ensure!(long_cycles(&method_calls(&circle)["Type"]) == BTreeSet::from(["a, b, c".to_owned()]));
    let mut wrong = Vec::new();
    for src in workspace()? {
        for (name, calls) in method_calls(&modules(&src)?) {
            let cycles = long_cycles(&calls).into_iter();
            wrong.extend(cycles.map(|cycle| format!("{} {name}: {cycle}", src.display())));
        }
    }
    ensure!(wrong.is_empty(), "files of one type that call each other in a circle:\n{}", wrong.join("\n"));
    Ok(())
}

#[test]
fn files_import_each_other_in_pairs_at_most() -> Result<()> {
    let mut wrong = BTreeSet::new();
    for src in workspace()? {
        let modules = modules(&src)?;
        let edges: Graph = modules
            .iter()
            .map(|(module, code)| {
                // A crate's root and a module's `mod.rs` re-export their parts; that is not a use of them.
                let own = uses(code).into_iter().filter(|(public, _)| !public).map(|(_, path)| path);
                let paths = own.chain(inline_paths(code));
                let imported = paths.filter_map(|path| resolve(module, &path, &modules, 0));
                (module.clone(), imported.filter(|other| other != module).collect())
            })
            .collect();
        wrong.extend(long_cycles(&edges).into_iter().map(|cycle| format!("{}: {cycle}", src.display())));
    }
    ensure!(
        wrong.is_empty(),
        "import cycles of more than two files:\n{}",
        wrong.into_iter().collect::<Vec<_>>().join("\n")
    );
    Ok(())
}
