//! Placeholders for characters of messages, which show where a rendered prompt has text of the messages.

use std::collections::BTreeSet;

/// One private-use character for each marked character.
#[derive(Debug)]
pub(super) struct Marks<'a> {
    /// The marked characters.
    characters: &'a [char],
    /// Placeholder of the first; the others follow.
    first: u32,
}

/// The two private-use planes.
const PRIVATE_USE: [(u32, u32); 2] = [(0xF_0000, 0xF_FFFD), (0x10_0000, 0x10_FFFD)];

impl<'a> Marks<'a> {
    /// Whether a character is one of those that placeholders are chosen from.
    pub(super) fn is_private(c: char) -> bool {
        u32::from(c) >= PRIVATE_USE[0].0
    }

    /// Chooses placeholders that no text has; `None` if there are not enough.
    pub(super) fn new<'t, T>(characters: &'a [char], texts: impl Fn() -> T) -> Option<Self>
    where
        T: Iterator<Item = &'t str>,
    {
        let used: BTreeSet<u32> =
            texts().flat_map(str::chars).map(u32::from).filter(|c| *c >= PRIVATE_USE[0].0).collect();
        let count = u32::try_from(characters.len()).ok()?;
        PRIVATE_USE.iter().find_map(|(from, to)| {
            let mut first = *from;
            while first + count <= *to {
                // Skips past the last one that is used.
                match used.range(first..first + count).next_back() {
                    None => return Some(Self { characters, first }),
                    Some(last) => first = last + 1,
                }
            }
            None
        })
    }

    /// Replaces the marked characters at positions that `wanted` accepts.
    pub(super) fn mark(&self, text: &str, wanted: impl Fn(usize) -> bool) -> String {
        let placeholder = |c: char| {
            let index = self.characters.iter().position(|marked| *marked == c)?;
            char::from_u32(self.first + index as u32)
        };
        let characters = text.char_indices();
        characters.map(|(at, c)| placeholder(c).filter(|_| wanted(at)).unwrap_or(c)).collect()
    }

    /// Replaces placeholders by their characters; returns the text and the byte offsets of the replaced characters.
    pub(super) fn restore(&self, text: &str) -> (String, Vec<u32>) {
        let (mut restored, mut at) = (String::with_capacity(text.len()), Vec::new());
        for c in text.chars() {
            let index = u32::from(c).checked_sub(self.first).map(|index| index as usize);
            match index.and_then(|index| self.characters.get(index)) {
                Some(marked) => {
                    at.push(restored.len() as u32);
                    restored.push(*marked);
                }
                None => restored.push(c),
            }
        }
        (restored, at)
    }
}
