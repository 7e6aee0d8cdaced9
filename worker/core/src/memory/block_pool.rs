//! Pool of blocks with reference counts; blocks without an owner are in intrusive free lists.

/// Index of a block in its pool.
pub type Block = u32;

/// Null block index: at the ends of a free list, and in place of a block that is not there.
pub(crate) const NONE: Block = Block::MAX;

/// Free list of a block without an owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum List {
    /// Without content that is of use.
    Empty = 0,
    /// With cached content that is of less use than other: outside the sliding window of the sequence that computed it and not hit by another
    /// one, or a state behind which there is a later one.
    Passed = 1,
    /// With cached content.
    Cached = 2,
}

/// Lists in the order of allocation.
const ORDER: [List; 3] = [List::Empty, List::Passed, List::Cached];

#[derive(Debug, Clone, Copy)]
struct BlockMeta {
    /// Reference count: tables and transfers that own the block.
    refs: u32,
    /// List of the block while it has no owner.
    list: List,
    /// Whether its content is in the prefix cache.
    kept: bool,
    /// Whether a sequence that did not compute its content has used it.
    hit: bool,
    /// Value of the pool's free counter when the block was last freed.
    freed: u64,
    /// Neighbours in the free list; valid while `refs` is 0.
    prev: Block,
    next: Block,
}

/// Ends of a doubly linked free list; blocks are allocated from the head.
#[derive(Debug, Clone, Copy)]
struct FreeList {
    head: Block,
    tail: Block,
    len: u32,
}

/// Pool of blocks: the owners of each, and the order in which those without an owner are allocated.
///
/// Allocation takes blocks without cached content first, then those outside a sliding window, then the least recently freed one.
///
/// **Invariants**: free + owned = total after every call. A block is in a free list exactly while it has no owner: in `Empty` if
/// its content is not kept, else in one of the others, each ordered by the time of the release.
#[derive(Debug)]
pub(crate) struct BlockPool {
    meta: Vec<BlockMeta>,
    lists: [FreeList; 3],
    free: u32,
    frees: u64,
}

impl BlockPool {
    /// Creates a pool of `total` free blocks.
    pub fn new(total: u32) -> Self {
        let unused = BlockMeta {
            refs: 0,
            list: List::Empty,
            kept: false,
            hit: false,
            freed: 0,
            prev: NONE,
            next: NONE,
        };
        let empty = FreeList { head: NONE, tail: NONE, len: 0 };
        let mut pool = Self { meta: vec![unused; total as usize], lists: [empty; 3], free: 0, frees: 0 };
        // Low indices first, so that a lightly used pool touches little memory.
        (0..total).rev().for_each(|block| pool.link(block, List::Empty, NONE));
        pool
    }

    /// Returns the number of blocks in the pool.
    pub fn total(&self) -> u32 {
        self.meta.len() as u32
    }

    /// Returns the number of blocks without an owner, cached ones included.
    pub fn free(&self) -> u32 {
        self.free
    }

    /// Returns the number of blocks without an owner whose content is cached.
    pub fn cold(&self) -> u32 {
        self.lists[List::Passed as usize].len + self.lists[List::Cached as usize].len
    }

    /// Returns the reference count of a block.
    pub fn owners(&self, block: Block) -> u32 {
        self.meta[block as usize].refs
    }

    /// Allocates a free block to the caller, and says whether its content was kept; `None` if no block is free.
    pub fn take(&mut self) -> Option<(Block, bool)> {
        let block = ORDER.iter().map(|list| self.lists[*list as usize].head).find(|head| *head != NONE)?;
        self.unlink(block);
        let meta = &mut self.meta[block as usize];
        (meta.refs, meta.hit) = (1, false);
        Some((block, std::mem::take(&mut meta.kept)))
    }

    /// Adds an owner to a block that is cached or in another table.
    pub fn share(&mut self, block: Block) {
        if self.meta[block as usize].refs == 0 {
            self.unlink(block);
        }
        self.meta[block as usize].refs += 1;
    }

    /// Adds an owner to a block for its cached content.
    pub fn share_hit(&mut self, block: Block) {
        self.share(block);
        self.meta[block as usize].hit = true;
    }

    /// Keeps the content of an owned block when it is released.
    pub fn keep(&mut self, block: Block) {
        let meta = &mut self.meta[block as usize];
        debug_assert!(meta.refs > 0, "a block without an owner was cached");
        meta.kept = true;
    }

    /// Gives up the content of a block; without an owner, it is allocated next.
    pub fn forget(&mut self, block: Block) {
        let free = self.meta[block as usize].refs == 0;
        if free {
            self.unlink(block);
        }
        let meta = &mut self.meta[block as usize];
        (meta.kept, meta.hit) = (false, false);
        if free {
            self.link(block, List::Empty, NONE);
        }
    }

    /// Releases one reference to a block.
    ///
    /// # Panics
    /// If the block has no owner (double release).
    pub fn release(&mut self, block: Block) {
        self.release_to(block, List::Cached);
    }

    /// Releases one reference to a block whose rows a window has passed: unless its content has been hit, it is allocated before
    /// other cached ones.
    ///
    /// # Panics
    /// If the block has no owner (double release).
    pub fn release_passed(&mut self, block: Block) {
        self.release_to(block, if self.meta[block as usize].hit { List::Cached } else { List::Passed });
    }

    /// Releases one reference to a block; `demoted`: it is allocated before other cached ones.
    ///
    /// # Panics
    /// If the block has no owner (double release).
    pub fn release_kept(&mut self, block: Block, demoted: bool) {
        self.release_to(block, if demoted { List::Passed } else { List::Cached });
    }

    fn release_to(&mut self, block: Block, list: List) {
        if self.drop_owner(block) {
            self.frees += 1;
            let meta = &mut self.meta[block as usize];
            meta.freed = self.frees;
            let list = if meta.kept { list } else { List::Empty };
            let after = if meta.kept { self.lists[list as usize].tail } else { NONE };
            self.link(block, list, after);
        }
    }

    /// Releases a reference that was taken only to copy the block. If it was the last one, the block returns
    /// to its previous position in the eviction order.
    ///
    /// # Panics
    /// If the block has no owner (double release).
    pub fn release_cold(&mut self, block: Block) {
        if !self.drop_owner(block) {
            return;
        }
        let BlockMeta { freed, kept, list, .. } = self.meta[block as usize];
        let list = if kept { list } else { List::Empty };
        let mut after = NONE;
        if kept {
            // The block was near the head, so the search is short.
            let mut next = self.lists[list as usize].head;
            while next != NONE && self.meta[next as usize].freed < freed {
                after = next;
                next = self.meta[next as usize].next;
            }
        }
        self.link(block, list, after);
    }

    /// Removes an owner. Returns true if it was the last one.
    fn drop_owner(&mut self, block: Block) -> bool {
        let meta = &mut self.meta[block as usize];
        assert!(meta.refs > 0, "block {block} was released twice");
        meta.refs -= 1;
        meta.refs == 0
    }

    /// Returns the free cached blocks in eviction order.
    pub fn coldest(&self) -> impl Iterator<Item = Block> + '_ {
        [List::Passed, List::Cached].into_iter().flat_map(|list| {
            let head = self.lists[list as usize].head;
            let first = (head != NONE).then_some(head);
            std::iter::successors(first, |block| {
                let next = self.meta[*block as usize].next;
                (next != NONE).then_some(next)
            })
        })
    }

    /// Inserts a block without owners into a free list behind `after`, or at the head if `after` is `NONE`.
    fn link(&mut self, block: Block, list: List, after: Block) {
        self.meta[block as usize].list = list;
        let ends = &mut self.lists[list as usize];
        ends.len += 1;
        let next = match after {
            NONE => std::mem::replace(&mut ends.head, block),
            after => std::mem::replace(&mut self.meta[after as usize].next, block),
        };
        match next {
            NONE => ends.tail = block,
            next => self.meta[next as usize].prev = block,
        }
        let meta = &mut self.meta[block as usize];
        (meta.prev, meta.next) = (after, next);
        self.free += 1;
    }

    /// Removes a block from its free list.
    fn unlink(&mut self, block: Block) {
        let BlockMeta { prev, next, list, .. } = self.meta[block as usize];
        let ends = &mut self.lists[list as usize];
        ends.len -= 1;
        match prev {
            NONE => ends.head = next,
            prev => self.meta[prev as usize].next = next,
        }
        match next {
            NONE => ends.tail = prev,
            next => self.meta[next as usize].prev = prev,
        }
        self.free -= 1;
    }

    /// Checks the pool's invariants. `claims[block]` is the number of references held by tables and transfers, and `is_kept` says
    /// whether the content of a block is cached.
    ///
    /// # Panics
    /// If an invariant is violated.
    pub fn assert_consistent(&self, claims: &[u32], is_kept: impl Fn(Block) -> bool) {
        for (block, meta) in self.meta.iter().enumerate() {
            assert_eq!(meta.refs, claims[block], "owners of block {block}");
            assert_eq!(meta.kept, is_kept(block as Block), "pool and cache disagree about block {block}");
        }
        let mut listed = 0;
        for list in ORDER {
            let ends = self.lists[list as usize];
            let (mut at, mut before, others) = (ends.head, NONE, listed);
            while at != NONE {
                let meta = &self.meta[at as usize];
                assert_eq!((meta.refs, meta.prev), (0, before), "a free list is broken at block {at}");
                assert_eq!(meta.list, list, "block {at} is in the wrong list");
                assert_eq!(meta.kept, list != List::Empty, "block {at} is in the wrong list");
                let in_order = !meta.kept || before == NONE || self.meta[before as usize].freed < meta.freed;
                assert!(in_order, "out of order");
                (before, at, listed) = (at, meta.next, listed + 1);
                assert!(listed <= self.total(), "a free list is a circle");
            }
            assert_eq!(before, ends.tail, "a free list loses its end");
            assert_eq!(listed - others, ends.len, "a free list is miscounted");
        }
        assert_eq!(listed, self.free, "a free list loses blocks");
        assert_eq!(listed + claims.iter().filter(|refs| **refs > 0).count() as u32, self.total());
    }
}
