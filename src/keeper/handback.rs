//! D→P sync for engines that move KV themselves: after a turn, what D holds of its prompt goes back to a P. The engine
//! does it (`Engine::hand_back`); here it is decided whether it is worth it, and booked.

use std::sync::Arc;

use super::Keeper;
use super::books::Served;
use super::hold::Hold;
use super::local::Keepers;
use crate::actors::api::DispatchPlan;
use crate::core::ledger::AdmitRequest;
use crate::core::sync::SyncRule;
use crate::core::types::{BlockHash, Tokens};
use crate::engines::Handed;
use crate::telemetry;

/// One handing back, begun in P's books. Dropped it leaves nothing.
#[derive(Debug)]
pub struct HandBack {
    /// P's base URL.
    pub to: Arc<str>,
    from: Arc<Keeper>,
    hold: Hold,
}

impl HandBack {
    /// It is over.
    pub fn done(mut self, how: Handed) {
        telemetry::handed_back(how.as_str());
        match how {
            Handed::Stored => self.hold.commit(&Served::default()),
            Handed::NoHandles => self.from.gives_no_handles(),
            Handed::Failed => {}
        }
    }
}

impl Keepers {
    /// What is worth handing back after a complete turn of `chain`, by the options' trigger and smallest batch.
    ///
    /// Such an engine hands KV back after a turn or never: with the trigger `evict` it does so when D is half full, for
    /// only then is the session likely to be dropped before it returns.
    pub fn hand_backs(&self, plan: &DispatchPlan, chain: &Arc<[BlockHash]>) -> Vec<HandBack> {
        let options = &self.config().options;
        let Some(rule) = SyncRule::of(options).filter(|_| self.config().engine.hands_back()) else {
            return Vec::new();
        };
        let from = self.of(&plan.decode);
        let pressed = from.with(|books, _| books.load().used * 2 >= books.load().k_d).unwrap_or(false);
        if !(rule.on_commit || pressed) || !from.hands_back() {
            return Vec::new();
        }
        let one = |to: &str| {
            let keeper = self.at(to)?;
            let held = keeper.with(|books, _| books.ledger.residency().prefix(chain))?;
            let missing = (chain.len() - held) as Tokens * Tokens::from(options.block_tokens);
            if !rule.worth(missing) {
                return None;
            }
            let request = AdmitRequest {
                request_id: format!("{}-back", plan.request_id),
                session: plan.session.clone(),
                turn: 0,
                chain: chain.clone(),
                input_len: chain.len() as Tokens * Tokens::from(options.block_tokens),
                output_reserve: 0,
            };
            let hold = keeper.force(request, true).ok()?;
            Some(HandBack { to: to.into(), from: from.clone(), hold })
        };
        plan.sync.iter().filter_map(|target| one(&target.to)).collect()
    }
}
