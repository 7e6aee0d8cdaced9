/// Index of a KV block in the pool.
pub type Block = u32;

/// Which blocks are free and which are owned.
///
/// **Invariant**: free + owned = total after every call, and no block is both. A block is owned by exactly one
/// sequence's table; `take` hands it over and `give_back` returns it.
#[derive(Debug)]
pub struct BlockPool {
    free: Vec<Block>,
    owned: Vec<bool>,
}

impl BlockPool {
    /// A pool of `total` free blocks.
    pub fn new(total: u32) -> Self {
        // Popping from the end hands out low indices first: a lightly used pool stays small in memory.
        Self { free: (0..total).rev().collect(), owned: vec![false; total as usize] }
    }

    /// All blocks.
    pub fn total(&self) -> u32 {
        self.owned.len() as u32
    }

    /// Blocks that nobody owns.
    pub fn free(&self) -> u32 {
        self.free.len() as u32
    }

    /// Blocks in use.
    pub fn used(&self) -> u32 {
        self.total() - self.free()
    }

    /// Takes one block, if one is free.
    pub fn take(&mut self) -> Option<Block> {
        let block = self.free.pop()?;
        debug_assert!(!self.owned[block as usize], "block {block} was free and owned");
        self.owned[block as usize] = true;
        Some(block)
    }

    /// Takes blocks until `table` has `len` of them; takes none if there are too few.
    pub fn extend(&mut self, table: &mut Vec<Block>, len: u32) -> bool {
        let missing = (len as usize).saturating_sub(table.len());
        if missing > self.free.len() {
            return false;
        }
        for _ in 0..missing {
            table.extend(self.take());
        }
        true
    }

    /// Returns all blocks of a table, the last first, so that they are handed out in table order again.
    pub fn give_back(&mut self, table: &mut Vec<Block>) {
        while let Some(block) = table.pop() {
            assert!(
                std::mem::replace(&mut self.owned[block as usize], false),
                "block {block} was given back twice"
            );
            self.free.push(block);
        }
    }
}
