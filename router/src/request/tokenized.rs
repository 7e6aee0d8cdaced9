//! A request whose texts are tokenized and whose grammar compiles.

use tracing::Instrument as _;

use crate::outcome::Outcome;
use crate::request::checked::{Checked, Texts, ValidRequest, invalid_sampling};
use crate::request::resources::Resources;
use crate::request::tokenizing::TokenizeTerms;

/// Request with the tokens of its prompt, before truncation, and of its bad words. Its grammar compiles.
pub(super) struct Tokenized {
    pub(super) request: ValidRequest,
    pub(super) prompt: Vec<u32>,
}

impl Tokenized {
    /// Tokenizes the texts of a request and compiles its grammar, in turns with other tenants.
    pub(super) async fn new(checked: Checked, resources: &Resources) -> Result<Self, Outcome> {
        let Resources { options, tokenizing, compiling, .. } = resources;
        let Checked { mut request, texts: Texts { words, grammar, prompt } } = checked;
        let terms = TokenizeTerms::new(&request.terms, request.arrival.deadline);
        let words = words.tokenize(tokenizing, &terms).instrument(request.span.clone()).await?;
        let added = request.sampling.add_bad_words(words);
        added.map_err(|error| invalid_sampling(error, request.draft.constraint_field))?;
        request.held.keep(&request.sampling, &request.draft.stop.stop, options)?;
        if let Some(grammar) = grammar {
            grammar.compile(compiling, &terms).instrument(request.span.clone()).await?;
        }
        let prompt = prompt.tokenize(tokenizing, &terms).instrument(request.span.clone()).await?;
        Ok(Self { request, prompt: prompt.into_tokens() })
    }
}
