//! Further names of models, as their workers give them. The dispatcher's core knows each model by its first name alone.

use std::collections::{BTreeMap, BTreeSet};

use inflight_router_core::WorkerId;

/// Further names of the models. A name holds for all workers of a model, whichever of them gives it, and until the model is forgotten
/// if the last worker to give names leaves.
#[derive(Debug, Default)]
pub(super) struct ModelAliases {
    workers: BTreeMap<WorkerId, Named>,
    /// Models by alias, each with the number of workers that give it.
    models: BTreeMap<String, BTreeMap<String, usize>>,
}

/// Names that a worker gives its model.
#[derive(Debug)]
struct Named {
    model: String,
    aliases: BTreeSet<String>,
}

impl ModelAliases {
    /// Replaces the names that a worker gives its model.
    pub(super) fn set(&mut self, worker: WorkerId, model: &str, aliases: &[String]) {
        self.remove(worker);
        let aliases: BTreeSet<String> = aliases.iter().filter(|alias| *alias != model).cloned().collect();
        for alias in &aliases {
            *self.models.entry(alias.clone()).or_default().entry(model.to_owned()).or_default() += 1;
        }
        self.workers.insert(worker, Named { model: model.to_owned(), aliases });
    }

    /// Removes the names that a worker gives, unless it is the last one known of its model.
    pub(super) fn release(&mut self, worker: WorkerId) {
        let Some(named) = self.workers.get(&worker) else { return };
        let same = |(other, others): (&WorkerId, &Named)| *other != worker && others.model == named.model;
        if self.workers.iter().any(same) {
            self.remove(worker);
        }
    }

    /// Removes the aliases of all models for which `keep` is false.
    pub(super) fn retain(&mut self, keep: impl Fn(&str) -> bool) {
        let gone = self.workers.iter().filter(|(_, named)| !keep(&named.model)).map(|(worker, _)| *worker);
        for worker in gone.collect::<Vec<_>>() {
            self.remove(worker);
        }
    }

    /// Returns the first names of the models with an alias.
    pub(super) fn models_of(&self, alias: &str) -> impl Iterator<Item = &str> {
        self.models.get(alias).into_iter().flat_map(BTreeMap::keys).map(String::as_str)
    }

    /// Returns the aliases of a model, sorted.
    pub(super) fn aliases_of(&self, model: &str) -> impl Iterator<Item = &str> {
        let of_model = move |(_, models): &(&String, &BTreeMap<String, usize>)| models.contains_key(model);
        self.models.iter().filter(of_model).map(|(alias, _)| alias.as_str())
    }

    fn remove(&mut self, worker: WorkerId) {
        let Some(Named { model, aliases }) = self.workers.remove(&worker) else { return };
        for alias in aliases {
            let Some(models) = self.models.get_mut(&alias) else { continue };
            if let Some(count) = models.get_mut(&model) {
                *count -= 1;
                if *count == 0 {
                    models.remove(&model);
                }
            }
            if models.is_empty() {
                self.models.remove(&alias);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<String> {
        text.split_whitespace().map(str::to_owned).collect()
    }

    #[test]
    fn names_hold_for_all_workers_of_a_model_until_the_last_one_is_forgotten() {
        let mut names = ModelAliases::default();
        let aliases =
            |names: &ModelAliases, model: &str| names.aliases_of(model).collect::<Vec<_>>().join(" ");
        let models = |names: &ModelAliases, alias: &str| names.models_of(alias).collect::<Vec<_>>().join(" ");
        names.set(WorkerId(0), "a", &words("x y"));
        names.set(WorkerId(1), "a", &words("y a"));
        names.set(WorkerId(2), "b", &words("y z"));
        assert_eq!((aliases(&names, "a"), aliases(&names, "b")), ("x y".to_owned(), "y z".to_owned()));
        assert_eq!((models(&names, "y"), models(&names, "a")), ("a b".to_owned(), String::new()));
        names.release(WorkerId(0));
        assert_eq!((aliases(&names, "a"), models(&names, "x")), ("y".to_owned(), String::new()));
        names.release(WorkerId(1));
        assert_eq!(models(&names, "y"), "a b", "the last worker of a model keeps its names");
        names.set(WorkerId(2), "c", &words("y"));
        assert_eq!((models(&names, "y"), aliases(&names, "b")), ("a c".to_owned(), String::new()));
        names.retain(|model| model == "c");
        assert_eq!(models(&names, "y"), "c");
        names.retain(|_| false);
        assert!(names.workers.is_empty() && names.models.is_empty(), "{names:?}");
    }
}
