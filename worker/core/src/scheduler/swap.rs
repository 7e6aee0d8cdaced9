//! Transfers of sequences and of cold prefix-cache blocks between device and host.

use super::Scheduler;
use super::plan_draft::PlanDraft;
use super::transfers::{InFlightTransfer, TransferPurpose};
use crate::memory::Tables;
use crate::sequence::SequenceState;
use crate::{BlockedBy, Direction, Time, Transfer, TransferId};

impl Scheduler {
    /// Starts the swap-out of a preempted sequence: the transfer takes the blocks with committed tokens; the
    /// others are freed at once.
    pub(super) fn swap_out(&mut self, index: u32, draft: &mut PlanDraft) {
        let (device, host, exclusive) = self.memory.swap_out(&mut self.sequences[index]);
        draft.incoming += exclusive;
        self.totals.blocks_swapped_out += u64::from(device.len());
        let transfer = self.start_transfer(index, Direction::Out, device, 0, host);
        self.sequences[index].state = SequenceState::SwappingOut { transfer };
    }

    /// Starts the swap-in of a sequence with a slot and device blocks. Returns false if it does not fit.
    pub(super) fn swap_in(&mut self, index: u32, now: Time) -> bool {
        if self.memory.blocks_to_swap_in(&self.sequences[index], self.is_alone()) > self.memory.free() {
            return false;
        }
        let Some(slot) = self.slots.take() else { return false };
        let (device, host) = self.memory.swap_in(&mut self.sequences[index]);
        self.swapped.retain(|other| *other != index);
        self.totals.blocks_swapped_in += u64::from(host.len());
        let transfer = self.start_transfer(index, Direction::In, device, 0, host);
        let sequence = &mut self.sequences[index];
        sequence.state = SequenceState::SwappingIn { transfer, slot };
        self.iteration.admitted.push((sequence.id, slot));
        self.resume(index, now);
        true
    }

    /// Returns what a swapped sequence lacks to be swapped in.
    pub(super) fn lacking_for_swap_in(&self, index: u32) -> BlockedBy {
        if self.slots.are_taken() {
            return BlockedBy::Slots;
        }
        let needed = self.memory.blocks_to_swap_in(&self.sequences[index], self.is_alone());
        BlockedBy::Blocks { needed, free: self.memory.free() }
    }

    /// Starts a transfer for a sequence. It takes ownership of the blocks. In each group, host block `i` is paired with
    /// device block `first + i`.
    pub(super) fn start_transfer(
        &mut self,
        index: u32,
        direction: Direction,
        device: Tables,
        first: usize,
        host: Tables,
    ) -> TransferId {
        let pairs = device.groups().iter().zip(host.groups()).flat_map(|(device, host)| {
            device.blocks().iter().skip(first).copied().zip(host.blocks().iter().copied())
        });
        let states = device.state().iter().copied().zip(host.state().iter().copied());
        let blocks = pairs.chain(states).collect();
        let purpose = TransferPurpose::Sequence(self.sequences[index].id);
        self.begin_transfer(direction, blocks, InFlightTransfer { direction, purpose, device, host })
    }

    /// Adds a transfer to the plan and to the transfers in flight.
    fn begin_transfer(
        &mut self,
        direction: Direction,
        blocks: Vec<(u32, u32)>,
        transfer: InFlightTransfer,
    ) -> TransferId {
        let id = self.transfers.start(transfer);
        self.iteration.transfers.push(Transfer { id, direction, blocks });
        id
    }

    /// Copies the prefix-cache blocks that would be evicted next to free host blocks, while no other transfer
    /// is in flight.
    pub(super) fn offload(&mut self) {
        if !self.transfers.is_empty() {
            return;
        }
        let offloaded = self.memory.take_cold();
        if offloaded.is_empty() {
            return;
        }
        self.totals.blocks_offloaded += offloaded.len() as u64;
        let blocks = offloaded.iter().map(|(device, host, _)| (*device, *host)).collect();
        let purpose = TransferPurpose::Offload(offloaded);
        let (device, host) = (Tables::default(), Tables::default());
        let transfer = InFlightTransfer { direction: Direction::Out, purpose, device, host };
        self.begin_transfer(Direction::Out, blocks, transfer);
    }
}
