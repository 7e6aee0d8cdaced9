//! Models that `inflight up` serves: from the command line, the environment, or `[[model]]` tables of the configuration file.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use clap::parser::ValueSource;
use clap::{ArgMatches, FromArgMatches as _};
use inflight_hub::ModelName;
use inflight_worker::ComputeOptions;

use super::args::Args;
use super::options::{RoleFlags, is_flag, model_command, model_flags, path_flag, replace_flag, variables_of};
use crate::config::ModelTable;
use crate::exit::{CommandError, Exit};
use crate::hub;

/// Maximum number of models.
const MODELS_MAX: usize = 64;

/// Model to serve, with the options of its workers.
#[derive(Debug, Clone)]
pub(super) struct ModelPlan {
    /// Model as it was given, for messages.
    pub(super) source: String,
    /// Options of its workers.
    pub(super) compute: ComputeOptions,
    /// The same as flags of a worker, as far as they were given.
    pub(super) flags: Vec<OsString>,
    /// Environment variables that its workers must not read, since a table says otherwise.
    pub(super) unset: Vec<OsString>,
    /// Number of workers, if it was given.
    pub(super) workers: Option<usize>,
    /// Share of the memory that several models divide, relative to the others.
    pub(super) memory_share: Option<f64>,
    /// Whether its part of a GPU's memory was given for this model alone.
    pub(super) has_own_utilization: bool,
}

impl ModelPlan {
    /// Creates the plan of a model from the flags of all workers and its own ones, which go before them; `keys` are the names of its own.
    fn new(
        general: &[OsString],
        own: &[OsString],
        keys: &BTreeSet<String>,
        workers: Option<u32>,
    ) -> Result<Self, CommandError> {
        let is_own = |flag: &OsString| {
            let has = |long: &str| is_flag(flag, &format!("--{long}"));
            keys.iter().any(|key| has(key)) || keys.contains("names") && has("model-name")
        };
        let flags = general.iter().filter(|flag| !is_own(flag)).chain(own);
        let command = model_command().no_binary_name(true);
        let matches = command.try_get_matches_from(flags).map_err(CommandError::Clap)?;
        let compute = ComputeOptions::from_arg_matches(&matches).map_err(CommandError::Clap)?;
        let source = compute.model.as_ref().map_or(String::new(), |model| model.display().to_string());
        Ok(Self {
            source,
            compute,
            flags: model_flags(&matches),
            unset: variables_of(keys),
            workers: matches.get_one::<u32>("workers").copied().or(workers).map(|number| number as usize),
            memory_share: matches.get_one::<f64>("memory_share").copied(),
            has_own_utilization: keys.contains("gpu-memory-utilization"),
        })
    }

    /// Returns the names under which the model will be served, as far as they are known without its files.
    fn known_names(&self) -> Vec<String> {
        let given = &self.compute.model_names;
        match &self.compute.model {
            Some(model) if given.is_empty() && !model.exists() => {
                let name = model.to_str().and_then(|model| ModelName::of_argument(model).ok().flatten());
                name.map(|name| name.repo().to_owned()).into_iter().collect()
            }
            Some(_) | None => given.clone(),
        }
    }

    /// Finds the files of the model, which are fetched from the Hub if it is one of there and they are missing.
    ///
    /// # Errors
    /// There is no such model, or it cannot be fetched.
    pub(super) fn resolve(&mut self) -> Result<(), CommandError> {
        hub::resolve(&mut self.compute, &hub::Display::of_command())?;
        if let Some(model) = &self.compute.model {
            // The path of its files, in place of the name that was given.
            replace_flag(&mut self.flags, "--model", model);
        }
        if !self.flags.iter().any(|flag| is_flag(flag, "--model-name")) {
            let names = self.compute.model_names.iter();
            self.flags.extend(names.map(|name| format!("--model-name={name}").into()));
        }
        Ok(())
    }
}

/// Returns the models to serve: those of the command line, else of the environment, else of the file, else the embedded one.
///
/// # Errors
/// Models or names are given in two ways, two models have a name in common, or a table is invalid.
pub(super) fn given(
    args: &Args,
    matches: &ArgMatches,
    tables: &[ModelTable],
) -> Result<Vec<ModelPlan>, CommandError> {
    let usage = |message: String| CommandError::new(Exit::Usage, message);
    let flagged = matches.get_many::<PathBuf>("model").into_iter().flatten();
    let mut sources: Vec<PathBuf> = flagged.cloned().collect();
    if let Some(model) = args.model_arguments.first() {
        if matches.value_source("model") == Some(ValueSource::CommandLine) {
            let model = model.display();
            return Err(usage(format!(
                "the model is given twice, as {model} and with --model: leave one out, or give several models with --model"
            )));
        }
        sources.clone_from(&args.model_arguments);
    }
    let number = sources.len().max(tables.len());
    if number > MODELS_MAX {
        return Err(usage(format!("{number} models are given; `up` serves at most {MODELS_MAX}")));
    }
    let mut general = RoleFlags::given(matches).worker;
    general.retain(|flag| !is_flag(flag, "--model"));
    let has_names = general.iter().any(|flag| is_flag(flag, "--model-name"));
    if number > 1 && has_names {
        return Err(usage(format!(
            "--model-name names one model, and {number} are given: write names in front of each, as in --model NAME,...=MODEL, or \
             as `names` in the [[model]] tables of --config"
        )));
    }
    let mut models = Vec::new();
    if sources.is_empty() && tables.is_empty() {
        models.push(ModelPlan::new(&general, &[], &BTreeSet::new(), args.workers)?);
    }
    for source in &sources {
        let (names, path) = split_names(source).map_err(usage)?;
        if has_names && !names.is_empty() {
            let message =
                format!("{} has names, and --model-name gives others: leave one out", source.display());
            return Err(usage(message));
        }
        let mut own = vec![path_flag("--model=", &path)];
        own.extend(names.iter().map(|name| OsString::from(format!("--names={name}"))));
        models.push(ModelPlan::new(&general, &own, &BTreeSet::new(), args.workers)?);
    }
    for table in tables.iter().filter(|_| sources.is_empty()) {
        models.push(of_table(table, &general, args.workers)?);
    }
    check_names(models.iter().map(|model| (model.source.as_str(), model.known_names())))?;
    Ok(models)
}

/// Returns the model of a table.
fn of_table(
    table: &ModelTable,
    general: &[OsString],
    workers: Option<u32>,
) -> Result<ModelPlan, CommandError> {
    let usage = |message: String| CommandError::new(Exit::Usage, message);
    let (own, keys) = table.flags(&model_command()).map_err(|error| usage(error.to_string()))?;
    if !keys.contains("model") {
        let message =
            "a [[model]] table has no key `model`, which names a model of the Hub, a path or inflight-demo";
        return Err(usage(format!("{}: {message}", table.place())));
    }
    for size in ["kv-cache-bytes", "gpu-memory-utilization"] {
        if keys.contains("memory-share") && keys.contains(size) {
            let message = format!(
                "a [[model]] table has `memory-share` and `{size}`, which is a share, too: leave one out"
            );
            return Err(usage(format!("{}: {message}", table.place())));
        }
    }
    ModelPlan::new(general, &own, &keys, workers)
}

/// Separates the names from a model that is written NAME,...=MODEL. A path that exists has no names, nor has one with a slash in front of
/// its first equals sign.
fn split_names(source: &Path) -> Result<(Vec<String>, PathBuf), String> {
    let plain = (Vec::new(), source.to_owned());
    let Some((names, model)) = source.to_str().and_then(|text| text.split_once('=')) else {
        return Ok(plain);
    };
    if source.exists() || names.contains('/') {
        return Ok(plain);
    }
    let names: Vec<String> = names.split(',').map(|name| name.trim().to_owned()).collect();
    if names.iter().any(String::is_empty) || model.is_empty() {
        return Err(format!(
            "--model {}: names and a model are written NAME,...=MODEL, and one of them is empty",
            source.display()
        ));
    }
    Ok((names, PathBuf::from(model)))
}

/// Checks that no name belongs to two models; each has its source and its names.
///
/// # Errors
/// A name and the two models that have it.
pub(super) fn check_names<'a>(
    models: impl IntoIterator<Item = (&'a str, Vec<String>)>,
) -> Result<(), CommandError> {
    let mut owners: BTreeMap<String, (usize, &str)> = BTreeMap::new();
    for (index, (source, names)) in models.into_iter().enumerate() {
        for name in names {
            let (owner, first) = *owners.entry(name.clone()).or_insert((index, source));
            if owner != index {
                let message = format!(
                    "{name} would be the name of two models, {first} and {source}: give one of them another name, as in \
                     --model NAME={source}, or leave one out"
                );
                return Err(CommandError::new(Exit::Usage, message));
            }
        }
    }
    Ok(())
}

/// Returns whether `--quantize` would make the weights of a model smaller: GGUF files have few bits already.
pub(super) fn is_quantizable(compute: &ComputeOptions) -> bool {
    let gguf = |path: &PathBuf| path.extension() == Some(OsStr::new("gguf"));
    compute.quantize.is_none() && compute.model.as_ref().is_some_and(|path| path.is_dir() && !gguf(path))
}

#[cfg(test)]
mod tests {
    use inflight_fixtures::TempDir;

    use super::*;
    use crate::config::parse;

    /// Parses `inflight up` with these words and this configuration file; returns the models and the router's flags.
    fn parsed(words: &[&str], file: &str) -> Result<(Vec<ModelPlan>, Vec<OsString>), String> {
        let folder = TempDir::new("up").unwrap();
        let path = folder.path().join("cluster.toml");
        std::fs::write(&path, file).unwrap();
        let config = format!("--config={}", path.display());
        let words = ["inflight", "up"].iter().chain(words).copied().chain([config.as_str()]);
        let invocation = parse(words.map(OsString::from)).map_err(|error| error.to_string())?;
        let crate::Subcommand::Up(args) = invocation.cli.subcommand else { panic!() };
        let models = given(&args, &invocation.matches, &invocation.models);
        let router = RoleFlags::given(&invocation.matches).router;
        Ok((models.map_err(|error| error.to_string())?, router))
    }

    fn sources(words: &[&str], file: &str) -> Vec<String> {
        parsed(words, file).unwrap().0.into_iter().map(|model| model.source).collect()
    }

    fn refusal(words: &[&str], file: &str) -> String {
        parsed(words, file).map(|(models, _)| models).unwrap_err()
    }

    #[test]
    fn models_of_the_command_line_go_before_those_of_the_file() {
        let file = "model = \"b\"\ntool-call-format = \"mistral\"\nrouter-bypass-max = 9\n";
        let (models, router) = parsed(&["a"], file).unwrap();
        assert_eq!((models[0].source.as_str(), models.len(), router.len()), ("a", 1, 2), "{router:?}");
        assert_eq!(sources(&[], file), ["b"]);
        assert_eq!(sources(&["-m", "c"], file), ["c"]);
        assert_eq!(sources(&["-m", "c", "--model", "d"], file), ["c", "d"]);
        assert_eq!(sources(&["c", "d"], file), ["c", "d"]);
        assert_eq!(sources(&[], "model = [\"a\", \"x=b\"]\n"), ["a", "b"]);
        let tables = "[[model]]\nmodel = \"a\"\n[[model]]\nmodel = \"b\"\n";
        assert_eq!(sources(&[], tables), ["a", "b"]);
        assert_eq!(sources(&["c"], tables), ["c"]);
        assert_eq!(sources(&[], ""), [""]);
        assert!(refusal(&["a", "-m", "c"], "").contains("given twice"));
        let unknown = refusal(&[], "a = 1\n\ntool-format = \"mistral\"\n");
        assert!(unknown.contains(":1: unknown key `a`") && unknown.contains("tool-call-format"), "{unknown}");
    }

    #[test]
    fn a_table_has_options_of_its_own_and_the_others_are_those_of_all() {
        let file = "max-sequences = 9\noverlap = true\nkv-cache-bytes = \"64MiB\"\n\n[[model]]\nmodel = \"a\"\n\
                    names = [\"x\", \"y\"]\nworkers = 3\nmemory_share = 2\noverlap = false\n\n[[model]]\n\
                    model = \"org/b\"\nkv-cache-bytes = \"32MiB\"\ndevice = \"cpu\"\n";
        let (models, _) = parsed(&["--workers=2", "--max-sequences=7"], file).unwrap();
        let [a, b] = models.as_slice() else { panic!("{models:?}") };
        let flags = |model: &ModelPlan| {
            let mut flags: Vec<_> =
                model.flags.iter().map(|flag| flag.to_str().unwrap().to_owned()).collect();
            flags.sort();
            flags.join(" ")
        };
        assert_eq!(
            flags(a),
            "--kv-cache-bytes=64MiB --max-sequences=7 --model-name=x --model-name=y --model=a"
        );
        assert_eq!(flags(b), "--device=cpu --kv-cache-bytes=32MiB --max-sequences=7 --model=org/b --overlap");
        assert_eq!(
            (a.workers, a.memory_share, b.workers, b.memory_share),
            (Some(3), Some(2.0), Some(2), None)
        );
        assert_eq!((a.compute.kv_cache_bytes, b.compute.kv_cache_bytes), (64 << 20, 32 << 20));
        assert!(!a.compute.overlap && b.compute.overlap);
        // The environment might say otherwise.
        assert!(a.unset.contains(&OsString::from("INFLIGHT_WORKER_OVERLAP")), "{:?}", a.unset);
        assert_eq!(b.known_names(), ["org/b"]);
    }

    #[test]
    fn what_several_models_cannot_have_is_refused_with_what_to_do() {
        /// Words, file and pieces of the message.
        type Case<'a> = (&'a [&'a str], &'a str, &'a [&'a str]);
        let of_a = "[[model]]\nmodel = \"a\"\n";
        let cases: [Case<'_>; 12] = [
            (&["-m=a", "-m=b", "--model-name=x"], "", &["2 are given", "--model NAME,...=MODEL", "`names`"]),
            (&["-m=x=a", "--model-name=y"], "", &["x=a has names", "leave one out"]),
            (&["-m=org/a", "-m=org/a"], "", &["org/a would be the name of two models", "org/a and org/a"]),
            (&["-m=x=a", "-m=y,x=b"], "", &["x would be the name of two models", "a and b"]),
            (
                &[],
                "[[model]]\nnames = [\"a\"]\n",
                &[":2: a [[model]] table has no key `model`", "inflight-demo"],
            ),
            (&[], &format!("{of_a}port = 3\n"), &[":3: key `port`", "no such key", "memory-share, "]),
            (&[], &format!("{of_a}workers = 300\n"), &[":3: key `workers`", "300"]),
            (&[], &format!("{of_a}memory-share = 0\n"), &[":3: key `memory-share`", "above 0"]),
            (&[], &format!("{of_a}memory-share = 2\nkv-cache-bytes = 3\n"), &["leave one out"]),
            (&[], &format!("{of_a}device = \"abacus\"\n"), &[":3: key `device`", "abacus"]),
            (&[], "[model]\nmodel = \"a\"\n", &[":1: key `model`", "write [[model]]"]),
            (&[], "model = [1]\n", &[":1: key `model`: expected a string"]),
        ];
        for (words, file, clues) in cases {
            let refused = refusal(words, file);
            for clue in clues {
                assert!(refused.contains(clue), "{words:?} {file:?}: no {clue:?} in {refused}");
            }
        }
        let many: Vec<String> = (0..65).map(|number| format!("-m=m{number}")).collect();
        let many: Vec<&str> = many.iter().map(String::as_str).collect();
        assert!(refusal(&many, "").contains("65 models are given; `up` serves at most 64"));
    }

    #[test]
    fn names_are_separated_from_models_and_paths_stay_whole() {
        let folder = TempDir::new("models").unwrap();
        let existing = folder.path().join("a=b");
        std::fs::create_dir(&existing).unwrap();
        let existing = existing.to_str().unwrap().to_owned();
        let cases: [(&str, &[&str], &str); 9] = [
            ("org/name", &[], "org/name"),
            ("org/name:Q4_K_M", &[], "org/name:Q4_K_M"),
            ("q=org/name@v1:Q4_K_M", &["q"], "org/name@v1:Q4_K_M"),
            ("q,gpt-4o=org/name", &["q", "gpt-4o"], "org/name"),
            ("q, r=/models/a=b", &["q", "r"], "/models/a=b"),
            ("demo=inflight-demo", &["demo"], "inflight-demo"),
            ("./run=3/model", &[], "./run=3/model"),
            ("/models/run=3", &[], "/models/run=3"),
            (&existing, &[], &existing),
        ];
        for (given, names, model) in cases {
            let (found, path) = split_names(Path::new(given)).unwrap();
            assert_eq!(
                (found, path.to_str().unwrap()),
                (names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>(), model)
            );
        }
        for given in ["=org/name", "a,=org/name", "a="] {
            assert!(split_names(Path::new(given)).unwrap_err().contains("NAME,...=MODEL"), "{given}");
        }
    }

    #[test]
    fn a_name_of_two_models_is_refused_with_both() {
        let check = |models: &[(&'static str, &[&str])]| {
            let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
            check_names(models.iter().map(|(source, given)| (*source, names(given))))
        };
        check(&[("org/a", &["a", "x"]), ("org/b", &["b"]), ("org/c", &[])]).unwrap();
        // One model may repeat a name.
        check(&[("org/a", &["a", "a"])]).unwrap();
        let refused = check(&[("org/a", &["a", "x"]), ("org/b", &["b", "x"])]).unwrap_err().to_string();
        for clue in ["x would be the name of two models", "org/a and org/b", "--model NAME=org/b"] {
            assert!(refused.contains(clue), "{refused}");
        }
    }
}
