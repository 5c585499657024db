//! Places for lanes. They come in chunks: growing moves nothing, and no more than a chunk is unused.

use super::lane::Lane;

/// Slots in a chunk.
const CHUNK: usize = 1024;

/// A place for a lane.
#[derive(Debug)]
pub(super) enum Slot {
    /// The generation of the next lane.
    Free(u32),
    Taken(Lane),
}

impl Slot {
    /// The generation of the lane here, or of the next one.
    pub const fn generation(&self) -> u32 {
        match self {
            Self::Free(generation) => *generation,
            Self::Taken(lane) => lane.generation,
        }
    }

    pub const fn lane(&self) -> Option<&Lane> {
        match self {
            Self::Free(_) => None,
            Self::Taken(lane) => Some(lane),
        }
    }

    pub const fn lane_mut(&mut self) -> Option<&mut Lane> {
        match self {
            Self::Free(_) => None,
            Self::Taken(lane) => Some(lane),
        }
    }

    /// Puts a lane here.
    pub fn put(&mut self, mut lane: Lane) {
        lane.generation = self.generation();
        *self = Self::Taken(lane);
    }

    /// Takes the lane out.
    pub fn take(&mut self) -> Option<Lane> {
        let next = self.generation().wrapping_add(1);
        match std::mem::replace(self, Self::Free(next)) {
            Self::Free(_) => None,
            Self::Taken(lane) => Some(lane),
        }
    }
}

/// All places, by number.
#[derive(Debug, Default)]
pub(super) struct Slots(Vec<Vec<Slot>>);

impl Slots {
    pub fn len(&self) -> usize {
        self.0.last().map_or(0, |last| (self.0.len() - 1) * CHUNK + last.len())
    }

    pub fn get(&self, at: u32) -> Option<&Slot> {
        self.0.get(at as usize / CHUNK)?.get(at as usize % CHUNK)
    }

    pub fn get_mut(&mut self, at: u32) -> Option<&mut Slot> {
        self.0.get_mut(at as usize / CHUNK)?.get_mut(at as usize % CHUNK)
    }

    /// Adds a place with a lane and gives its number.
    pub fn push(&mut self, lane: Lane) -> u32 {
        let (at, slot) = (self.len(), Slot::Taken(lane));
        match self.0.last_mut().filter(|last| last.len() < CHUNK) {
            Some(last) => last.push(slot),
            None => {
                let mut chunk = Vec::with_capacity(CHUNK);
                chunk.push(slot);
                self.0.push(chunk);
            }
        }
        at as u32
    }
}
