//! A running turn's hold on the books of its engine. Dropping it gives everything back.

use std::sync::Arc;

use super::Keeper;
use super::books::{Forced, NotBegun, Served};
use crate::core::ledger::AdmitRequest;
use crate::core::types::Tokens;
use crate::telemetry;

/// See the module.
#[derive(Debug)]
pub struct Hold {
    keeper: Arc<Keeper>,
    request_id: String,
    epoch: u64,
    /// The engine's slot for it.
    slot: Option<u32>,
    counted: bool,
    /// The session keeps what the turn leaves.
    keeps: bool,
    over: bool,
}

impl Keeper {
    /// Begins a turn on its lease of `epoch`.
    ///
    /// # Errors
    /// [`NotBegun`].
    pub fn begin(self: &Arc<Self>, request_id: &str, epoch: u64, keeps: bool) -> Result<Hold, NotBegun> {
        let begun = self.with(|books, now| {
            if books.epoch() == epoch { books.begin(request_id, now) } else { Err(NotBegun::NoLease) }
        });
        let slot = begun.unwrap_or(Err(NotBegun::NoLease))?;
        Ok(self.hold(request_id, epoch, Forced::Counted(slot), keeps))
    }

    /// Begins a turn nobody admitted.
    ///
    /// # Errors
    /// [`NotBegun`].
    pub fn force(self: &Arc<Self>, request: AdmitRequest, keeps: bool) -> Result<Hold, NotBegun> {
        let request_id = request.request_id.clone();
        let forced = self.with(|books, now| Ok((books.force(request, now)?, books.epoch())));
        let (forced, epoch) = forced.unwrap_or(Err(NotBegun::NoLease))?;
        Ok(self.hold(&request_id, epoch, forced, keeps))
    }

    fn hold(self: &Arc<Self>, request_id: &str, epoch: u64, forced: Forced, keeps: bool) -> Hold {
        let (counted, slot) = match forced {
            Forced::Counted(slot) => (true, slot),
            Forced::Uncounted => (false, None),
        };
        Hold {
            keeper: self.clone(),
            request_id: request_id.to_owned(),
            epoch,
            slot,
            counted,
            keeps,
            over: false,
        }
    }
}

impl Hold {
    /// The engine's slot for it, where it has fixed ones.
    pub fn slot(&self) -> Option<u32> {
        self.slot
    }

    /// The turn is complete. Only the first end counts.
    pub fn commit(&mut self, served: &Served) {
        let keeps = self.keeps;
        if keeps && !self.over {
            self.keeper.events().turn_ended();
        }
        self.end(|books, id, now| match keeps {
            true => books.commit(id, served, now),
            false => {
                books.release(id, now);
                None
            }
        });
    }

    fn end(&mut self, step: impl FnOnce(&mut super::Books, &str, u64) -> Option<Tokens>) {
        if std::mem::replace(&mut self.over, true) {
            return;
        }
        let short = self.keeper.with(|books, now| match (books.epoch() == self.epoch, self.counted) {
            // The engine it ran on is gone, and its books with it.
            (false, _) => None,
            (true, true) => step(books, &self.request_id, now),
            (true, false) => {
                books.uncounted_ends();
                None
            }
        });
        if let Some(tokens) = short.flatten() {
            tracing::info!(engine = %self.keeper.url, tokens, "an engine held less of a session than expected");
            telemetry::held_less(tokens);
        }
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.end(|books, id, now| {
            books.release(id, now);
            None
        });
    }
}
