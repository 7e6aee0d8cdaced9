//! Work and memory of the library's structures, from their own counts.
//!
//! The bytes are estimates. Beside those that an allocator counted they are 0.7 to 2 times as many: 1.7 times for the median of
//! JSON schemas, 0.8 to 1.2 times where a lexer has many states.

use llguidance::TokenParser;
use llguidance::earley::{CGrammar, CSymIdx};

/// Bytes of a state of the lexer beside the library's count and its set of lexemes.
const STATE_BYTES: usize = 64;
/// Bytes of the specification of a lexeme, of which each matcher has a copy.
const LEXEME_BYTES: usize = 300;
/// Bytes of an item of the parser, with its argument.
const ITEM_BYTES: usize = 16;
/// Bytes of a row of the parser.
const ROW_BYTES: usize = 160;
/// Bytes that the parser keeps for a byte of the output.
const BYTE_BYTES: usize = 40;
/// Bytes of a capture beside its name and text.
const CAPTURE_BYTES: usize = 64;
/// Bytes of a symbol of a compiled grammar.
const SYMBOL_BYTES: usize = 256;
/// Bytes of an element of its rules.
const ELEMENT_BYTES: usize = 140;
/// Lexemes that a transition of the lexer visits in a unit of work.
const LEXEMES_PER_UNIT: usize = 256;
/// Divisor of the squared row length in the work of an Earley item: completing a row of n items of an ambiguous grammar compares up to
/// n^3 / 16 pairs of items.
const COMPARISONS_PER_UNIT: usize = 1600;

/// Work and rows of a parser so far, in the library's counts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    /// Fuel of the lexer.
    fuel: u64,
    /// Items of the parser, also of rows that were taken back.
    items: usize,
    rows: usize,
    transitions: usize,
    /// States of the lexer.
    pub(crate) states: usize,
    /// Bytes of the lexer.
    lexer_bytes: usize,
}

impl Counts {
    pub(crate) fn of(parser: &TokenParser) -> Self {
        let (lexer, stats) = (parser.parser.lexer_stats(), parser.parser.stats());
        let spec = parser.parser.grammar().lexer_spec();
        let lexeme_set = lexer.num_regexps.div_ceil(8) + STATE_BYTES;
        let lexer_bytes = lexer.num_bytes
            + lexer.num_states * lexeme_set
            + lexer.num_regexps * LEXEME_BYTES
            + spec.regex_builder.exprset().num_bytes();
        Self {
            fuel: lexer.total_fuel_spent as u64,
            items: stats.all_items,
            rows: stats.rows,
            transitions: lexer.num_transitions,
            states: lexer.num_states,
            lexer_bytes,
        }
    }

    /// Work since, in units of about 100 ns: fuel of the lexer, its transitions, each of which visits the lexemes, and items of the
    /// parser, which searches the items of a row for each.
    pub(crate) fn work_since(&self, before: &Self, lexemes: usize) -> u64 {
        let transitions = (self.transitions - before.transitions) * (1 + lexemes / LEXEMES_PER_UNIT);
        let items = self.items - before.items;
        let in_row = items / (self.rows - before.rows).max(1);
        let items = items * (1 + in_row * in_row / COMPARISONS_PER_UNIT);
        self.fuel - before.fuel + (transitions + items) as u64
    }

    /// Bytes of the rows that were added since, if all of them are kept.
    pub(crate) fn row_bytes_since(&self, before: &Self) -> usize {
        (self.items - before.items) * ITEM_BYTES + (self.rows - before.rows) * ROW_BYTES
    }

    /// Bytes of the lexer, and of what the parser keeps for each byte and for a mask of the vocabulary.
    pub(crate) fn bytes(&self, parser: &TokenParser) -> usize {
        let mask = parser.token_env.tok_trie().vocab_size() / 8;
        self.lexer_bytes + 2 * mask + parser.parser.get_bytes().len() * BYTE_BYTES
    }
}

/// Returns the bytes of the captures behind the first `skip`; the library keeps two copies of a text.
pub(crate) fn capture_bytes(parser: &TokenParser, skip: usize) -> usize {
    let new = parser.captures().iter().skip(skip);
    new.map(|(name, text)| 2 * (name.len() + text.len()) + CAPTURE_BYTES).sum()
}

/// Returns the bytes of a compiled grammar, which its matchers share.
pub(crate) fn grammar_bytes(grammar: &CGrammar) -> usize {
    let mut seen = std::collections::HashSet::from([grammar.start()]);
    let mut open: Vec<CSymIdx> = vec![grammar.start()];
    let mut elements = 0;
    while let Some(symbol) = open.pop() {
        for rule in grammar.rules_of(symbol) {
            let (symbols, _, _) = grammar.rule_rhs(*rule);
            elements += symbols.len() + 1;
            open.extend(symbols.iter().filter(|symbol| seen.insert(**symbol)));
        }
    }
    let spec = grammar.lexer_spec();
    let lexer = spec.lexemes.len() * LEXEME_BYTES + spec.regex_builder.exprset().num_bytes();
    seen.len() * SYMBOL_BYTES + elements * ELEMENT_BYTES + lexer
}
