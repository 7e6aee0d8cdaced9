//! Transfers between device and host that have not reached their fences.

use std::collections::BTreeMap;

use inflight_contract::BlockHash;

use crate::memory::Tables;
use crate::{Block, Direction, SequenceId, TransferId};

/// Device block that is copied to a host block, and the hash of its content.
pub(super) type Offloaded = (Block, Block, BlockHash);

/// Transfer between device and host. It owns its blocks.
#[derive(Debug)]
pub(super) struct InFlightTransfer {
    pub direction: Direction,
    pub purpose: TransferPurpose,
    /// Device blocks: the whole tables of the sequence, even if only a part is copied.
    pub device: Tables,
    pub host: Tables,
}

/// Purpose of a transfer.
#[derive(Debug)]
pub(super) enum TransferPurpose {
    /// Swap of a sequence, or load of its prefix from the host.
    Sequence(SequenceId),
    /// Transfer of a sequence that has ended: its blocks are freed at the fence.
    Orphaned,
    /// Offload of cold prefix-cache blocks to the host.
    Offload(Vec<Offloaded>),
}

impl InFlightTransfer {
    fn offloaded(&self) -> &[Offloaded] {
        match &self.purpose {
            TransferPurpose::Offload(blocks) => blocks,
            TransferPurpose::Sequence(_) | TransferPurpose::Orphaned => &[],
        }
    }

    /// Returns the device blocks that it owns.
    pub fn device_blocks(&self) -> impl Iterator<Item = Block> + '_ {
        self.device.blocks().chain(self.offloaded().iter().map(|(device, ..)| *device))
    }

    /// Returns the host blocks that it owns.
    pub fn host_blocks(&self) -> impl Iterator<Item = Block> + '_ {
        self.host.blocks().chain(self.offloaded().iter().map(|(_, host, _)| *host))
    }

    /// Returns the sequence that waits for it.
    pub fn owner(&self) -> Option<SequenceId> {
        match self.purpose {
            TransferPurpose::Sequence(owner) => Some(owner),
            TransferPurpose::Orphaned | TransferPurpose::Offload(_) => None,
        }
    }
}

/// Transfers in flight, by id.
#[derive(Debug, Default)]
pub(super) struct Transfers {
    in_flight: BTreeMap<TransferId, InFlightTransfer>,
    last: u64,
}

impl Transfers {
    /// Adds a transfer and returns its id.
    pub fn start(&mut self, transfer: InFlightTransfer) -> TransferId {
        self.last += 1;
        let id = TransferId(self.last);
        self.in_flight.insert(id, transfer);
        id
    }

    /// Removes a transfer that reached its fence or failed.
    pub fn finish(&mut self, id: TransferId) -> Option<InFlightTransfer> {
        self.in_flight.remove(&id)
    }

    /// Notes that the sequence of a transfer has ended.
    pub fn orphan(&mut self, id: TransferId) {
        if let Some(transfer) = self.in_flight.get_mut(&id) {
            transfer.purpose = TransferPurpose::Orphaned;
        }
    }

    /// Returns a transfer.
    pub fn get(&self, id: TransferId) -> Option<&InFlightTransfer> {
        self.in_flight.get(&id)
    }

    /// Returns all transfers, by id.
    pub fn iter(&self) -> impl Iterator<Item = &InFlightTransfer> {
        self.in_flight.values()
    }

    /// Returns true without transfers.
    pub fn is_empty(&self) -> bool {
        self.in_flight.is_empty()
    }

    /// Returns the number of sequences that are being swapped out.
    pub fn swapping_out(&self) -> u32 {
        let swaps =
            self.iter().filter(|transfer| transfer.direction == Direction::Out && transfer.owner().is_some());
        swaps.count() as u32
    }
}
