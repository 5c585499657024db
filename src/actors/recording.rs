//! Records a live decision in the format `explain` replays.

use std::sync::Arc;

use super::api::TurnRequest;
use super::gather::Fleet;
use super::session::TurnKey;
use super::shared::Shared;
use crate::core::dispatch::RoundRobin;
use crate::core::route::SessionState;
use crate::core::turn::{Answer, Attempt, Dispatch, Turn};
use crate::core::types::WorkerId;
use crate::explain::record::{
    AfterRecord, AttemptRecord, BackupRecord, Expect, OutcomeRecord, Record, RequestRecord, SessionRecord,
    WorkerRecord,
};

/// What was known when the last round of a turn began.
pub struct Recording {
    shared: Arc<Shared>,
    state: SessionState,
    fleet: Fleet,
    attempts_before: usize,
    waited: bool,
}

impl Recording {
    /// Nothing recorded yet.
    pub fn new(shared: &Arc<Shared>) -> Self {
        Self {
            shared: shared.clone(),
            state: SessionState::default(),
            fleet: Fleet::default(),
            attempts_before: 0,
            waited: false,
        }
    }

    /// A round begins: later ones replace it, since each starts from fresh state.
    pub fn round(&mut self, state: &SessionState, fleet: &Fleet, machine: &Turn) {
        self.state = state.clone();
        self.fleet = fleet.clone();
        self.attempts_before = machine.attempts().len();
        self.waited = machine.waited();
    }

    fn name(&self, id: WorkerId) -> String {
        self.shared.worker(id).map_or_else(|| id.to_string(), |w| w.at.name.to_string())
    }

    /// The record of the turn, with what happened as its expectation.
    pub fn finish(
        &self,
        key: TurnKey,
        request: &TurnRequest,
        machine: &Turn,
        plan: &Dispatch,
        after: &SessionState,
    ) -> Box<Record> {
        let attempts = &machine.attempts()[self.attempts_before..];
        let options = &self.shared.config.options;
        let settings = match serde_json::to_value(&**options) {
            Ok(serde_json::Value::Object(map)) => map,
            _ => serde_json::Map::new(),
        };
        let prefill = self.fleet.prefill.iter().map(|p| self.name(p.id)).collect();
        Box::new(Record {
            name: format!("live-{key:x}"),
            settings,
            able: self.shared.config.cost.able,
            workers: self.workers(request, attempts),
            prefill,
            prefill_backlog: self.fleet.prefill.iter().map(|p| p.backlog).collect(),
            prefill_held: self.fleet.prefill.iter().map(|p| p.held).collect(),
            round_robin: RoundRobin {
                prefill: place(self.fleet.prefill.iter().map(|p| Some(p.id)), plan.prefill),
                decode: place(self.fleet.decode.iter().map(|d| Some(d.id)), Some(plan.decode)),
            },
            session: SessionRecord {
                id: request.session.public().to_owned(),
                turn: request.turn,
                pin: self.state.pin.map(|d| self.name(d)),
                rejects: self.state.rejects.iter().map(|(d, n)| (self.name(*d), *n)).collect(),
            },
            request: RequestRecord {
                prefix_hashes: Vec::new(),
                append_len: request.append_len,
                input_len: Some(request.input_len),
                output_reserve: machine.output_reserve(),
                waited: self.waited,
            },
            expect: Some(self.expect(attempts, plan, after)),
        })
    }

    fn workers(&self, request: &TurnRequest, attempts: &[Attempt]) -> Vec<WorkerRecord> {
        let asked = |d: WorkerId| attempts.iter().rev().find(|a| a.choice.worker == d).and_then(|a| a.answer);
        let record = |c: &crate::core::route::Candidate| {
            let answer = asked(c.id);
            let terms = match answer {
                Some(Answer::Admitted { terms, .. } | Answer::Rejected { terms, .. }) => terms,
                _ => None,
            };
            let session = (request.session.public().to_owned(), c.resident);
            WorkerRecord {
                id: self.name(c.id),
                k_d: c.load.map_or(0, |l| l.k_d),
                resident: Vec::new(),
                sessions: (c.resident > 0).then_some(session).into_iter().collect(),
                inflight: c.inflight,
                assigned: c.assigned,
                overlap: Some(c.overlap),
                load: c.load,
                pinned_tokens: c.pinned_tokens,
                backup: (c.backup.tokens > 0).then(|| BackupRecord {
                    tokens: c.backup.tokens,
                    from: c.backup.source.map(|p| self.name(p)),
                }),
                warm: Some(c.warm),
                terms,
                unreachable: matches!(answer, Some(Answer::Silent | Answer::Unreachable)),
            }
        };
        self.fleet.decode.iter().map(record).collect()
    }

    fn expect(&self, attempts: &[Attempt], plan: &Dispatch, after: &SessionState) -> Expect {
        let plus = |d: WorkerId| u32::from(d == plan.decode);
        let decode = self.fleet.decode.iter();
        Expect {
            attempts: attempts.iter().map(|a| AttemptRecord::of(a, |d| self.name(d))).collect(),
            outcome: OutcomeRecord {
                mode: plan.mode.as_str().into(),
                prefill: plan.prefill.map(|p| self.name(p)),
                decode: Some(self.name(plan.decode)),
                rung: Some(plan.rung),
            },
            after: AfterRecord {
                pin: after.pin.map(|d| self.name(d)),
                rejects: after.rejects.iter().map(|(d, n)| (self.name(*d), *n)).collect(),
                inflight: decode.clone().map(|c| (self.name(c.id), c.inflight + plus(c.id))).collect(),
                assigned: decode.map(|c| (self.name(c.id), c.assigned + u64::from(plus(c.id)))).collect(),
            },
        }
    }
}

/// Where the round robin that chose `id` must have stood.
fn place(mut all: impl Iterator<Item = Option<WorkerId>>, id: Option<WorkerId>) -> usize {
    all.position(|other| other == id).unwrap_or(0)
}
