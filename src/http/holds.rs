//! What a running turn holds in the books of its engines, where this gateway keeps them.

use std::cell::RefCell;
use std::sync::Arc;

use super::observe::Observed;
use crate::actors::api::{DispatchPlan, Failure, TurnResult, WorkerRef};
use crate::core::ledger::AdmitRequest;
use crate::core::types::{BlockHash, Tokens};
use crate::keeper::Keeper;
use crate::keeper::books::Served;
use crate::keeper::handback::HandBack;
use crate::keeper::hold::Hold;
use crate::keeper::local::Keepers;

/// What the books must know of a turn beside its plan.
#[derive(Debug, Clone)]
pub(super) struct Asked {
    /// `t(r)`.
    pub turn: u32,
    /// `prefix_hashes(r)`.
    pub chain: Arc<[BlockHash]>,
    /// `input_len(r)` in tokens.
    pub input_len: Tokens,
}

/// A turn's holds. Dropping them gives back what was not committed.
#[derive(Debug)]
pub(super) struct Holds {
    keepers: Keepers,
    chain: Arc<[BlockHash]>,
    decode: RefCell<Option<Hold>>,
    prefill: RefCell<Option<Hold>>,
    /// The P's that have a part in the turn. They serve the model that D serves and say less: what D counts in the prompt
    /// holds for them too.
    prefillers: Vec<Arc<Keeper>>,
}

impl Holds {
    /// Begins a placed turn in the books, and tells the plan which of the engine's slots is the turn's.
    pub fn begin(keepers: &Keepers, plan: &mut DispatchPlan, asked: &Asked) -> Self {
        let request = || AdmitRequest {
            request_id: plan.request_id.clone(),
            session: plan.session.clone(),
            turn: asked.turn,
            chain: asked.chain.clone(),
            input_len: asked.input_len,
            output_reserve: 0,
        };
        let keeps = !plan.one_shot;
        // A lease that is gone (its engine has started anew meanwhile) is no reason to fail the turn.
        let force = |at: &WorkerRef| keepers.of(at).force(request(), keeps).ok();
        let leased = plan.lease.as_ref();
        let leased = leased.and_then(|l| keepers.of(&plan.decode).begin(&l.request_id, l.epoch, keeps).ok());
        let decode = leased.or_else(|| force(&plan.decode));
        let prefill = plan.prefill.as_ref().filter(|_| plan.rung.uses_prefill()).and_then(force);
        plan.slot = decode.as_ref().and_then(Hold::slot);
        let seeds = plan.prefill.as_ref().map(|p| p.url.as_ref());
        let prefillers = seeds.into_iter().chain(plan.sync.iter().map(|sync| sync.to.as_ref()));
        let prefillers = prefillers.filter_map(|url| keepers.at(url)).collect();
        Self {
            keepers: keepers.clone(),
            chain: asked.chain.clone(),
            decode: RefCell::new(decode),
            prefill: RefCell::new(prefill),
            prefillers,
        }
    }

    /// P has computed the prompt and keeps it in its cache.
    pub fn prefill_done(&self) {
        if let Some(mut hold) = self.prefill.take() {
            hold.commit(&Served::default());
        }
    }

    /// D has answered.
    pub fn complete(&self, seen: &Observed) {
        if let Some(mut hold) = self.decode.take() {
            hold.commit(&Served::from(&TurnResult::from(seen)));
            for keeper in self.prefillers.iter().filter(|_| seen.prompt_tokens.is_some()) {
                keeper.with(|books, _| books.learn(self.chain.len(), seen.prompt_tokens.unwrap_or_default()));
            }
        }
    }

    /// What D may hand back to a P, now that the turn is complete.
    pub fn hand_backs(&self, plan: &DispatchPlan) -> Vec<HandBack> {
        self.keepers.hand_backs(plan, &self.chain)
    }

    /// The turn failed at a worker: look at its engine now instead of with the next second.
    pub fn failed(self, plan: &DispatchPlan, failure: Failure) {
        match (failure, &plan.prefill) {
            (Failure::DecodeUnreachable, _) => self.keepers.of(&plan.decode).suspect(),
            (Failure::PrefillUnreachable, Some(p)) => self.keepers.of(p).suspect(),
            _ => {}
        }
    }
}
