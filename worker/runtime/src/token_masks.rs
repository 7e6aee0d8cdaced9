//! Token masks of a step: the tokens that each masked sample row may draw.

use super::{Batch, Error};

/// Token masks of the masked sample rows of a step, in their order; [rows, words] with bit `i % 32` of word
/// `i / 32` set if token `i` is allowed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TokenMasks {
    words: usize,
    bits: Vec<u32>,
}

impl TokenMasks {
    /// Number of words of a row.
    pub fn words(vocab_size: u32) -> usize {
        vocab_size.div_ceil(32) as usize
    }

    /// Returns the masks of a step without masked rows.
    pub fn none(vocab_size: u32) -> Self {
        Self { words: Self::words(vocab_size), bits: Vec::new() }
    }

    /// Empties the masks and keeps their buffer.
    pub fn clear(&mut self, vocab_size: u32) {
        self.words = Self::words(vocab_size);
        self.bits.clear();
    }

    /// Appends a row that allows every token, and returns it.
    pub fn push_row(&mut self) -> &mut [u32] {
        let start = self.bits.len();
        self.bits.resize(start + self.words, u32::MAX);
        &mut self.bits[start..]
    }

    /// Appends a row.
    pub fn push(&mut self, row: &[u32]) {
        self.push_row().copy_from_slice(row);
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.bits.len().checked_div(self.words).unwrap_or(0)
    }

    /// Returns a row.
    pub fn row(&self, at: usize) -> &[u32] {
        &self.bits[at * self.words..(at + 1) * self.words]
    }

    /// Returns all rows, one after the other.
    pub fn bits(&self) -> &[u32] {
        &self.bits
    }

    /// Whether a row allows a token.
    pub fn allows(row: &[u32], token: u32) -> bool {
        row.get(token as usize / 32).is_some_and(|word| word >> (token % 32) & 1 == 1)
    }

    /// Checks that there is a row of the vocabulary's size for each masked sample row of a step.
    ///
    /// # Errors
    /// [`Error::Malformed`].
    pub fn check(&self, batch: &Batch, vocab_size: u32) -> Result<(), Error> {
        let (rows, masked) = (self.rows(), batch.masked_rows());
        if rows != masked || self.words != Self::words(vocab_size) {
            let words = self.words;
            return Err(Error::Malformed(format!(
                "{rows} masks of {words} words were supplied for {masked} masked rows"
            )));
        }
        Ok(())
    }
}
