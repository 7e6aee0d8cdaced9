//! Memory of a sequence: groups of layers that keep the rows of the same positions, in equal blocks of one pool.
//!
//! A row is what a layer keeps of a token, such as its key and value. Layers that keep the same positions form a group: those with
//! full attention one, those with a sliding window of a size another. A span of `block_tokens` tokens takes whole blocks of each
//! group, so that counting, swapping and copying know nothing of layers. Recurrent layers keep a state of one size, whatever the length
//! of the sequence: it takes whole blocks of the same pool.

use std::fmt;

/// Maximum groups of a model.
pub const GROUPS_MAX: usize = 4;

/// Maximum blocks of a span in a group.
pub const SPAN_BLOCKS_MAX: u32 = 64;

/// Maximum blocks of a sequence's recurrent state.
pub const STATE_BLOCKS_MAX: u32 = 1 << 16;

/// Layers that keep the rows of the same positions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub struct LayerGroup {
    /// Blocks that hold the rows of a span of tokens in all layers of the group.
    pub blocks: u32,
    /// Positions that a token sees, its own included. `None`: all up to its own.
    pub window: Option<u32>,
}

impl LayerGroup {
    /// Returns the first span with a position that the token at `position` sees.
    #[inline]
    pub fn first_span(self, position: u32, block_tokens: u32) -> u32 {
        let first = |window: u32| (position + 1).saturating_sub(window) / block_tokens.max(1);
        self.window.map_or(0, first)
    }

    /// Returns the number of spans before a span boundary that a sequence needs to go on from there; `None`: all.
    #[inline]
    pub fn reach(self, block_tokens: u32) -> Option<u32> {
        self.window.map(|window| (window - 1).div_ceil(block_tokens.max(1)))
    }

    /// Returns the maximum number of spans that a sequence of `tokens` tokens holds at once, with at most `ahead` tokens that are
    /// computed together.
    pub fn spans(self, tokens: u32, ahead: u32, block_tokens: u32) -> u32 {
        let block_tokens = block_tokens.max(1);
        let all = tokens.div_ceil(block_tokens);
        // The tokens computed together and the positions that the first of them sees, wherever they start in a span.
        let seen = |window: u32| {
            let positions = window.saturating_add(ahead.max(1)) - 1;
            (positions - 1).div_ceil(block_tokens) + 1
        };
        self.window.map_or(all, |window| all.min(seen(window)))
    }
}

/// Groups of a model's layers, the tokens of a span, and the blocks of the recurrent layers' state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(try_from = "(u32, Vec<LayerGroup>, u32)", into = "(u32, Vec<LayerGroup>, u32)")]
pub struct MemoryShape {
    block_tokens: u32,
    count: usize,
    groups: [LayerGroup; GROUPS_MAX],
    state_blocks: u32,
}

/// Groups that contradict each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ShapeError {
    /// No group, or too many.
    #[error("a model has 1 to {GROUPS_MAX} groups of layers, not {0}")]
    Groups(usize),
    /// A span without tokens.
    #[error("a span has at least 1 token")]
    BlockTokens,
    /// Too few or too many blocks.
    #[error("a span of tokens takes 1 to {SPAN_BLOCKS_MAX} blocks of a group, not {0}")]
    Blocks(u32),
    /// A window without positions.
    #[error("a window has at least 1 position")]
    Window,
    /// A group behind one with a smaller window, or two with the same.
    #[error("groups are listed from full attention to the smallest window, each once")]
    Order,
    /// Too many blocks of a state.
    #[error("the state of a sequence takes at most {STATE_BLOCKS_MAX} blocks, not {0}")]
    State(u32),
}

impl MemoryShape {
    /// Creates the shape of these groups, listed from full attention to the smallest window.
    ///
    /// # Errors
    /// [`ShapeError`] if a number is out of range or the order is another one.
    pub fn new(block_tokens: u32, groups: &[LayerGroup]) -> Result<Self, ShapeError> {
        if !(1..=GROUPS_MAX).contains(&groups.len()) {
            return Err(ShapeError::Groups(groups.len()));
        }
        if block_tokens == 0 {
            return Err(ShapeError::BlockTokens);
        }
        for group in groups {
            if !(1..=SPAN_BLOCKS_MAX).contains(&group.blocks) {
                return Err(ShapeError::Blocks(group.blocks));
            }
            if group.window == Some(0) {
                return Err(ShapeError::Window);
            }
        }
        let size = |group: &LayerGroup| group.window.unwrap_or(u32::MAX);
        if groups.windows(2).any(|pair| size(&pair[0]) <= size(&pair[1])) {
            return Err(ShapeError::Order);
        }
        let mut shape = Self { count: groups.len(), ..Self::uniform(block_tokens) };
        shape.groups[..groups.len()].copy_from_slice(groups);
        Ok(shape)
    }

    /// Creates the shape of a model whose layers all have full attention: a block holds a span.
    pub const fn uniform(block_tokens: u32) -> Self {
        let groups = [LayerGroup { blocks: 1, window: None }; GROUPS_MAX];
        Self { block_tokens, count: 1, groups, state_blocks: 0 }
    }

    /// Returns the shape with a state of `blocks` blocks, which a sequence holds beside those of its tokens while it holds any.
    ///
    /// # Errors
    /// [`ShapeError::State`] for more than [`STATE_BLOCKS_MAX`].
    pub fn with_state(self, blocks: u32) -> Result<Self, ShapeError> {
        if blocks > STATE_BLOCKS_MAX {
            return Err(ShapeError::State(blocks));
        }
        Ok(Self { state_blocks: blocks, ..self })
    }

    /// Returns the tokens of a span.
    #[inline]
    pub fn block_tokens(&self) -> u32 {
        self.block_tokens
    }

    /// Returns the groups, from full attention to the smallest window.
    #[inline]
    pub fn groups(&self) -> &[LayerGroup] {
        &self.groups[..self.count]
    }

    /// Returns true if all layers keep all positions, and a block holds a span.
    #[inline]
    pub fn is_uniform(&self) -> bool {
        self.count == 1 && self.groups[0] == LayerGroup { blocks: 1, window: None } && self.state_blocks == 0
    }

    /// Returns the blocks of a sequence's recurrent state; 0 without recurrent layers.
    #[inline]
    pub fn state_blocks(&self) -> u32 {
        self.state_blocks
    }

    /// Returns true if a group gives up positions.
    #[inline]
    pub fn has_windows(&self) -> bool {
        self.groups().last().is_some_and(|group| group.window.is_some()) // the smallest is the last
    }

    /// Returns the blocks that a span of tokens takes in all groups.
    #[inline]
    pub fn span_blocks(&self) -> u32 {
        self.groups().iter().map(|group| group.blocks).sum()
    }

    /// Returns the blocks of a sequence of `tokens` tokens that gives up no positions.
    #[inline]
    pub fn whole_blocks(&self, tokens: u32) -> u32 {
        self.spans(tokens) * self.span_blocks() + self.state_blocks
    }

    /// Returns the number of spans that hold `tokens` tokens.
    #[inline]
    pub fn spans(&self, tokens: u32) -> u32 {
        tokens.div_ceil(self.block_tokens.max(1))
    }

    /// Returns the maximum number of blocks that a sequence of `tokens` tokens holds at once, with at most `ahead` tokens that are
    /// computed together: an upper bound for every length up to `tokens`, which is reached.
    pub fn blocks(&self, tokens: u32, ahead: u32) -> u32 {
        let blocks =
            |group: &LayerGroup| group.blocks.saturating_mul(group.spans(tokens, ahead, self.block_tokens));
        let state = if tokens > 0 { self.state_blocks } else { 0 };
        self.groups().iter().map(blocks).fold(state, u32::saturating_add)
    }

    /// Returns the maximum length of a sequence, in tokens, that `blocks` blocks hold if it computes a token at a time; at most
    /// `u32::MAX`.
    pub fn tokens(&self, blocks: u32) -> u32 {
        if self.is_uniform() {
            return blocks.saturating_mul(self.block_tokens);
        }
        let (mut fits, mut too_many) = (0u64, 1u64 << 32);
        while fits + 1 < too_many {
            let middle = fits.midpoint(too_many);
            let needed = self.blocks(middle as u32, 1);
            *(if needed <= blocks { &mut fits } else { &mut too_many }) = middle;
        }
        fits as u32
    }

    /// Returns the number of tokens that a pool of `blocks` blocks holds if it is filled with sequences of `context` tokens, the last of
    /// which may be shorter. With sliding windows, one longer sequence could have more tokens.
    pub fn pool_tokens(&self, blocks: u64, context: u32) -> u64 {
        let each = u64::from(self.blocks(context, 1));
        if self.is_uniform() || each == 0 {
            return blocks.saturating_mul(self.block_tokens.into());
        }
        let rest = u32::try_from(blocks % each).unwrap_or(u32::MAX);
        (blocks / each).saturating_mul(context.into()).saturating_add(self.tokens(rest).min(context).into())
    }
}

impl TryFrom<(u32, Vec<LayerGroup>, u32)> for MemoryShape {
    type Error = ShapeError;

    fn try_from((block_tokens, groups, state): (u32, Vec<LayerGroup>, u32)) -> Result<Self, ShapeError> {
        Self::new(block_tokens, &groups)?.with_state(state)
    }
}

impl From<MemoryShape> for (u32, Vec<LayerGroup>, u32) {
    fn from(shape: MemoryShape) -> Self {
        (shape.block_tokens, shape.groups().to_vec(), shape.state_blocks)
    }
}

impl fmt::Display for MemoryShape {
    /// Writes the groups and the state, such as `full attention 1 block, window 1024 6 blocks` or
    /// `full attention 1 block, state 96 blocks a sequence`.
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, group) in self.groups().iter().enumerate() {
            let comma = if index > 0 { ", " } else { "" };
            let plural = if group.blocks == 1 { "" } else { "s" };
            match group.window {
                None => write!(out, "{comma}full attention {} block{plural}", group.blocks)?,
                Some(window) => write!(out, "{comma}window {window} {} block{plural}", group.blocks)?,
            }
        }
        match self.state_blocks {
            0 => Ok(()),
            1 => write!(out, ", state 1 block a sequence"),
            blocks => write!(out, ", state {blocks} blocks a sequence"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn full(blocks: u32) -> LayerGroup {
        LayerGroup { blocks, window: None }
    }

    fn window(blocks: u32, window: u32) -> LayerGroup {
        LayerGroup { blocks, window: Some(window) }
    }

    #[test]
    fn groups_that_contradict_each_other_are_refused() {
        for (groups, error) in [
            (vec![], ShapeError::Groups(0)),
            (vec![full(1); 5], ShapeError::Groups(5)),
            (vec![full(0)], ShapeError::Blocks(0)),
            (vec![full(1), window(65, 9)], ShapeError::Blocks(65)),
            (vec![full(1), window(1, 0)], ShapeError::Window),
            (vec![window(1, 9), full(1)], ShapeError::Order),
            (vec![full(1), full(1)], ShapeError::Order),
            (vec![window(1, 8), window(1, 9)], ShapeError::Order),
        ] {
            assert_eq!(MemoryShape::new(16, &groups), Err(error), "{groups:?}");
        }
        assert_eq!(MemoryShape::new(0, &[full(1)]), Err(ShapeError::BlockTokens));
        let most = STATE_BLOCKS_MAX + 1;
        assert_eq!(MemoryShape::uniform(16).with_state(most), Err(ShapeError::State(most)));
        let shape = MemoryShape::new(16, &[full(1), window(6, 1024)]).unwrap();
        assert_eq!(shape.to_string(), "full attention 1 block, window 1024 6 blocks");
        assert!(!shape.is_uniform() && MemoryShape::new(16, &[full(1)]).unwrap().is_uniform());
    }

    #[test]
    fn a_state_is_held_once_whatever_the_length() {
        let shape = MemoryShape::uniform(16).with_state(96).unwrap();
        assert!(!shape.is_uniform() && !shape.has_windows());
        assert_eq!((shape.blocks(0, 1), shape.blocks(1, 1), shape.blocks(1600, 64)), (0, 97, 196));
        assert_eq!((shape.tokens(96), shape.tokens(97), shape.tokens(196)), (0, 16, 1600));
        assert_eq!(shape.pool_tokens(3 * 196 + 100, 1600), 3 * 1600 + 64);
        assert_eq!(shape.to_string(), "full attention 1 block, state 96 blocks a sequence");
    }

    #[test]
    fn a_window_of_1024_holds_its_positions_and_a_block() {
        let shape = MemoryShape::new(16, &[full(1), window(6, 1024)]).unwrap();
        assert_eq!(shape.blocks(32_768, 1), 2048 + 6 * 65);
        assert_eq!(shape.blocks(100, 1), 7 + 6 * 7);
        assert_eq!(shape.tokens(2048 + 6 * 65), 32_768);
        // Three sequences, and what a fourth has left.
        assert_eq!(shape.pool_tokens(3 * (2048 + 6 * 65), 32_768), 3 * 32_768);
        assert_eq!(shape.pool_tokens(3 * (2048 + 6 * 65) + 7 * 5 + 6, 32_768), 3 * 32_768 + 5 * 16);
        assert_eq!(MemoryShape::uniform(16).pool_tokens(1 << 40, 100), 1 << 44);
    }

    proptest! {
        /// A sequence that computes `ahead` tokens at a time and frees the spans that its window has passed.
        #[test]
        fn the_bound_holds_and_is_reached(
            block_tokens in 1u32..9, size in 1u32..40, ahead in 1u32..20, tokens in 1u32..200,
        ) {
            let group = window(1, size);
            let bound = group.spans(tokens, ahead, block_tokens);
            let mut most = 0;
            // Every alignment of the chunks: the first one is shorter.
            for first in 1..=ahead.min(tokens) {
                let (mut start, mut end) = (0, first);
                while start < tokens {
                    let held = end.div_ceil(block_tokens) - group.first_span(start, block_tokens);
                    most = most.max(held);
                    (start, end) = (end, (end + ahead).min(tokens));
                }
            }
            prop_assert!(most <= bound, "{most} spans held, bound {bound}");
            // A long sequence reaches the bound: its chunks start at every offset in a span.
            let periods = block_tokens * ahead;
            if tokens.is_multiple_of(block_tokens) && tokens >= size + periods + 2 * ahead {
                prop_assert_eq!(most, bound);
            }
        }

        #[test]
        fn the_first_span_and_the_reach_agree(block_tokens in 1u32..9, size in 1u32..60, boundary in 0u32..40) {
            let group = window(1, size);
            let reach = group.reach(block_tokens).unwrap();
            prop_assert_eq!(group.first_span(boundary * block_tokens, block_tokens), boundary.saturating_sub(reach));
        }

        #[test]
        fn tokens_is_the_inverse_of_blocks(
            block_tokens in 1u32..9, blocks in 0u32..60, size in prop::option::of(1u32..40), each in (1u32..4, 1u32..4),
            state in 0u32..20,
        ) {
            let groups: Vec<_> = [full(each.0)].into_iter().chain(size.map(|size| window(each.1, size))).collect();
            let shape = MemoryShape::new(block_tokens, &groups).unwrap().with_state(state).unwrap();
            let tokens = shape.tokens(blocks);
            prop_assert!(shape.blocks(tokens, 1) <= blocks);
            prop_assert!(shape.blocks(tokens + 1, 1) > blocks);
        }
    }
}
