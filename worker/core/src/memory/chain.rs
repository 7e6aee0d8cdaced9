//! Order of cached spans in their sequences: where a sequence can resume although windows have passed earlier spans.

use inflight_contract::MemoryShape;

use super::block_pool::{Block, NONE};

/// A cached span, in the place of its leader.
#[derive(Debug, Clone, Copy)]
struct Link {
    /// Index of the span in its sequence.
    position: u32,
    /// Block before it, first span behind it, and neighbours among the spans behind the same one.
    parent: Block,
    child: Block,
    next: Block,
    prev: Block,
    /// All spans before it are cached, and a group needs them.
    rooted: bool,
    /// Routers know that a sequence can resume behind it.
    announced: bool,
    /// It is in the cache.
    linked: bool,
}

const UNLINKED: Link = Link {
    position: 0,
    parent: NONE,
    child: NONE,
    next: NONE,
    prev: NONE,
    rooted: false,
    announced: false,
    linked: false,
};

/// Trees of cached spans, by leader. A sequence can resume behind a span if every group has the spans that the next token sees.
#[derive(Debug)]
pub(crate) struct Chain {
    links: Vec<Link>,
    /// Spans before a boundary that each group needs; `None`: all.
    reach: Vec<Option<u32>>,
    /// Spans to visit, with their distance; kept to avoid allocation.
    visits: Vec<(Block, u32)>,
}

impl Chain {
    /// Creates an empty chain for a pool of `total` blocks.
    pub fn new(shape: &MemoryShape, total: u32) -> Self {
        let reach = shape.groups().iter().map(|group| group.reach(shape.block_tokens())).collect();
        Self { links: vec![UNLINKED; total as usize], reach, visits: Vec::new() }
    }

    /// Returns true if routers know the span.
    pub fn is_announced(&self, block: Block) -> bool {
        self.links[block as usize].announced
    }

    /// Notes that routers know the span.
    pub fn announce(&mut self, block: Block) {
        self.links[block as usize].announced = true;
    }

    /// Notes that routers do not know the span any more. Returns true if they did.
    pub fn withdraw(&mut self, block: Block) -> bool {
        std::mem::take(&mut self.links[block as usize].announced)
    }

    /// Places a span behind another one, unless it has a place already.
    pub fn link(&mut self, block: Block, position: u32, parent: Option<Block>) {
        let link = &mut self.links[block as usize];
        (link.position, link.linked) = (position, true);
        if position == 0 {
            link.rooted = self.reach.contains(&None);
            return;
        }
        let Some(parent) = parent.filter(|_| link.parent == NONE) else { return };
        let (child, rooted) = (self.links[parent as usize].child, self.links[parent as usize].rooted);
        let link = &mut self.links[block as usize];
        (link.parent, link.next, link.prev) = (parent, child, NONE);
        if child != NONE {
            self.links[child as usize].prev = block;
        }
        self.links[parent as usize].child = block;
        if rooted {
            self.root(block);
        }
    }

    /// Marks a span and those behind it as having all spans before them.
    fn root(&mut self, block: Block) {
        let mut visits = std::mem::take(&mut self.visits);
        visits.push((block, 0));
        while let Some((block, _)) = visits.pop() {
            self.links[block as usize].rooted = true;
            visits.extend(self.children(block).map(|child| (child, 0)));
        }
        self.visits = visits;
    }

    fn children(&self, block: Block) -> impl Iterator<Item = Block> + '_ {
        let first = self.links[block as usize].child;
        let next = |block: &Block| {
            let next = self.links[*block as usize].next;
            (next != NONE).then_some(next)
        };
        std::iter::successors((first != NONE).then_some(first), next)
    }

    /// Returns true if a sequence can resume behind the span. `has` says whether a span has its blocks of a group.
    pub fn can_resume(&self, block: Block, has: impl Fn(Block, usize) -> bool) -> bool {
        if self.reach.contains(&None) && !self.links[block as usize].rooted {
            return false;
        }
        let farthest = self.reach.iter().flatten().copied().max().unwrap_or(0);
        let (mut at, mut distance) = (block, 0);
        while distance < farthest.max(1) {
            let needed = |reach: &Option<u32>| reach.is_none_or(|reach| distance < reach);
            let groups = self.reach.iter().enumerate().filter(|(_, reach)| needed(reach));
            if !groups.map(|(group, _)| group).all(|group| has(at, group)) {
                return false;
            }
            let Link { position, parent, .. } = self.links[at as usize];
            if position == 0 {
                return true;
            }
            distance += 1;
            if parent == NONE {
                return distance >= farthest;
            }
            at = parent;
        }
        true
    }

    /// Removes a span. Calls `withdrawn` with every other span that routers knew and behind which no sequence can resume now.
    pub fn remove(&mut self, block: Block, mut withdrawn: impl FnMut(Block)) {
        for group in 0..self.reach.len() {
            self.lose(block, group, &mut withdrawn);
        }
        let Link { parent, child, next, prev, .. } = self.links[block as usize];
        if parent != NONE && prev == NONE {
            self.links[parent as usize].child = next;
        }
        if prev != NONE {
            self.links[prev as usize].next = next;
        }
        if next != NONE {
            self.links[next as usize].prev = prev;
        }
        let mut orphan = child;
        while orphan != NONE {
            let link = &mut self.links[orphan as usize];
            (link.parent, link.prev) = (NONE, NONE);
            orphan = std::mem::replace(&mut link.next, NONE);
        }
        self.links[block as usize] = UNLINKED;
    }

    /// Notes that a span has lost its blocks of a group. Calls `withdrawn` with every span that routers knew and behind which no
    /// sequence can resume now.
    pub fn lose(&mut self, block: Block, group: usize, mut withdrawn: impl FnMut(Block)) {
        let reach = self.reach[group];
        let mut visits = std::mem::take(&mut self.visits);
        visits.push((block, 0));
        while let Some((at, distance)) = visits.pop() {
            let affected = match reach {
                Some(reach) => distance < reach,
                // Neither this span nor those behind it are rooted, so routers know none of them.
                None => self.links[at as usize].rooted,
            };
            if !affected {
                continue;
            }
            if reach.is_none() && at != block {
                self.links[at as usize].rooted = false;
            }
            if self.withdraw(at) {
                withdrawn(at);
            }
            visits.extend(self.children(at).map(|child| (child, distance + 1)));
        }
        self.visits = visits;
    }

    /// Checks that the trees hold the cached spans, and that a sequence can resume behind each span that routers know.
    ///
    /// # Panics
    /// If an invariant is violated.
    pub fn assert_consistent(
        &self,
        is_cached: impl Fn(Block) -> bool,
        has: impl Fn(Block, usize) -> bool + Copy,
    ) {
        for (block, link) in self.links.iter().enumerate() {
            let block = block as Block;
            assert_eq!(link.linked, is_cached(block), "chain and cache disagree about span {block}");
            assert!(
                !link.announced || self.can_resume(block, has),
                "no sequence can resume behind span {block}"
            );
            if link.parent != NONE {
                let parent = &self.links[link.parent as usize];
                assert_eq!(
                    (parent.linked, parent.position + 1),
                    (true, link.position),
                    "the parent of {block}"
                );
                assert!(self.children(link.parent).any(|child| child == block), "span {block} has no place");
                assert!(!parent.rooted || link.rooted, "span {block} has all spans before it");
            }
            let all_before =
                link.position == 0 || link.parent != NONE && self.links[link.parent as usize].rooted;
            assert!(!link.rooted || all_before, "a span before {block} is missing");
        }
    }
}
