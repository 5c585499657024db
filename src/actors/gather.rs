//! The shared gather: one score query to every worker actor, each answers into it when its turn comes, the
//! last one sends the result on. Nobody waits inside a handler.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use crate::core::route::{Candidate, PrefillView};

use super::backup::Holding;
use super::reply::Reply;

/// What a gather collects: the workers that are up, in the order of their ids.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Fleet {
    /// D workers that take turns.
    pub decode: Vec<Candidate>,
    /// P workers.
    pub prefill: Vec<PrefillView>,
    /// What each of them could send of the prompt.
    pub holdings: Vec<Holding>,
}

struct Shared {
    fleet: Fleet,
    reply: Option<Reply<Fleet>>,
}

/// One worker's place in a gather. Dropped unanswered, it counts as "not available".
pub struct GatherSlot(Arc<Inner>);

struct Inner(Mutex<Shared>);

/// Opens a gather for `n` workers; the reply is sent when every slot is answered or gone.
pub fn open(n: usize, reply: Reply<Fleet>) -> Vec<GatherSlot> {
    let shared = Arc::new(Inner(Mutex::new(Shared { fleet: Fleet::default(), reply: Some(reply) })));
    // With no worker at all, the only handle drops here and the reply goes out empty.
    (0..n).map(|_| GatherSlot(shared.clone())).collect()
}

impl GatherSlot {
    /// A D's answer.
    pub fn decode(self, candidate: Candidate) {
        self.0.lock().fleet.decode.push(candidate);
    }

    /// A P's answer.
    pub fn prefill(self, view: PrefillView, runs: Vec<Range<u32>>) {
        let mut shared = self.0.lock();
        shared.fleet.holdings.push(Holding { p: view.id, runs });
        shared.fleet.prefill.push(view);
    }
}

impl Inner {
    fn lock(&self) -> std::sync::MutexGuard<'_, Shared> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let mut shared = self.lock();
        let mut fleet = std::mem::take(&mut shared.fleet);
        fleet.decode.sort_by_key(|c| c.id);
        fleet.prefill.sort_by_key(|p| p.id);
        fleet.holdings.sort_by_key(|h| h.p);
        if let Some(reply) = shared.reply.take() {
            drop(shared);
            reply.send(fleet);
        }
    }
}

impl std::fmt::Debug for GatherSlot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("GatherSlot")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::types::WorkerId;

    fn view(id: u32) -> PrefillView {
        PrefillView { id: WorkerId(id), backlog: 0, held: 0 }
    }

    #[tokio::test]
    async fn the_last_answer_completes_it_and_a_lost_slot_does_not_hang_it() {
        let (reply, fleet) = Reply::channel();
        let mut slots = open(3, reply);
        slots.pop().unwrap().prefill(view(2), Vec::new());
        drop(slots.pop());
        slots.pop().unwrap().prefill(view(0), Vec::new());
        assert_eq!(fleet.await.unwrap().prefill, vec![view(0), view(2)]);
    }

    #[tokio::test]
    async fn no_workers_is_an_empty_fleet() {
        let (reply, fleet) = Reply::channel();
        open(0, reply);
        assert_eq!(fleet.await, Some(Fleet::default()));
    }
}
