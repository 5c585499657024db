//! `kvc-router explain`: why did this turn go there? Replays recorded states through the turn machine.

pub mod record;

use std::collections::{BTreeMap, HashSet};
use std::fmt::Write as _;

use crate::core::admit::{AdmitTerms, Verdict, admit};
use crate::core::cost::{Backup, CostModel};
use crate::core::options::Options;
use crate::core::residency::intersection;
use crate::core::route::{Ask, Candidate, PrefillView, SessionState};
use crate::core::turn::{Answer, Attempt, Command, Dispatch, Event, Refused, Rules, Turn};
use crate::core::types::{BlockHash, Tokens, WorkerId};
use record::{AfterRecord, AttemptRecord, Expect, OutcomeRecord, Record, WorkerRecord};

/// Explains every case of a JSON list. Returns the text and whether every `expect` was met.
///
/// # Errors
/// What is wrong with the input: the case and the field.
pub fn run(json: &str) -> Result<(String, bool), String> {
    let records: Vec<Record> = serde_json::from_str(json).map_err(|e| format!("not a list of cases: {e}"))?;
    if records.is_empty() {
        return Err("the list holds no case".into());
    }
    let (mut text, mut met, mut compared) = (String::new(), 0, 0);
    for record in &records {
        let found = decide(record).map_err(|e| format!("{}: {e}", record.name))?;
        print(&mut text, record, &found);
        if let Some(expect) = &record.expect {
            compared += 1;
            let differences = differences(expect, &found);
            met += usize::from(differences.is_empty());
            for line in differences {
                let _ = writeln!(text, "  DIFFERENCE {line}");
            }
        }
    }
    let _ = writeln!(text, "{} cases, {met} of {compared} with an expectation meet it", records.len());
    Ok((text, met == compared))
}

/// Runs one case through the turn machine.
///
/// # Errors
/// A worker named in the session that is not in the list, or a bad option.
pub fn decide(record: &Record) -> Result<Expect, String> {
    let options = record.options()?;
    let cost = CostModel { able: record.able, ..CostModel::reference() };
    let case = Case { record, options: &options, cost };
    let mut session = case.session()?;
    let candidates: Vec<Candidate> =
        record.workers.iter().enumerate().map(|(i, w)| case.candidate(i, w)).collect();
    let ask = case.ask();
    let mut turn = Turn::new(ask, record.request.output_reserve);
    if record.request.waited {
        turn.skip_waiting();
    }
    let mut end = End::Refused("no-workers");
    let mut commands = turn.step(&mut session, Event::Begin, case.rules());
    let prefills = case.prefills();
    let mut rr = record.round_robin;
    while let Some(command) = commands.pop() {
        let event = match command {
            Command::Gather => Event::Fleet { decode: &candidates, prefill: &prefills },
            Command::Admit { worker, .. } => Event::Answer(case.admit(worker)),
            Command::PickPrefill => Event::Prefill(rr.pick_prefill(&prefills, &options)),
            Command::PickFallback => {
                let ids: Vec<WorkerId> = candidates.iter().map(|c| c.id).collect();
                let Some((prefill, decode)) = rr.pick_fallback(&prefills, &ids, &options) else { break };
                Event::FallbackPair { prefill, decode }
            }
            Command::Release { .. } => continue,
            Command::Dispatch(plan) => {
                end = End::Dispatched(plan);
                break;
            }
            Command::Wait { .. } => {
                end = End::Refused("wait");
                break;
            }
            Command::Refuse(why) => {
                end = End::Refused(refused(why));
                break;
            }
        };
        commands = turn.step(&mut session, event, case.rules());
    }
    Ok(case.outcome(&session, turn.attempts(), end))
}

enum End {
    Dispatched(Dispatch),
    Refused(&'static str),
}

fn refused(why: Refused) -> &'static str {
    match why {
        Refused::TooLarge => "too-large",
        Refused::NoCapacity => "no-capacity",
        Refused::Busy => "busy",
        Refused::NoWorkers => "no-workers",
        Refused::NoPrefill => "no-prefill",
        Refused::Unsettled => "unsettled",
    }
}

struct Case<'a> {
    record: &'a Record,
    options: &'a Options,
    cost: CostModel,
}

impl Case<'_> {
    fn rules(&self) -> Rules<'_> {
        Rules { options: self.options, cost: &self.cost }
    }

    fn id(&self, name: &str) -> Result<WorkerId, String> {
        let place = self.record.workers.iter().position(|w| w.id == name);
        place.map(|i| WorkerId(i as u32)).ok_or(format!("session names an unknown worker {name:?}"))
    }

    fn name(&self, id: WorkerId) -> String {
        self.record.workers.get(id.0 as usize).map_or_else(|| id.to_string(), |w| w.id.clone())
    }

    fn session(&self) -> Result<SessionState, String> {
        let session = &self.record.session;
        let mut state = SessionState {
            pin: session.pin.as_deref().map(|name| self.id(name)).transpose()?,
            ..SessionState::default()
        };
        for (name, n) in &session.rejects {
            state.rejects.push((self.id(name)?, *n));
        }
        Ok(state)
    }

    fn ask(&self) -> Ask {
        let request = &self.record.request;
        let prefix = request.prefix_hashes.len() as Tokens * Tokens::from(self.options.block_tokens);
        Ask {
            turn: self.record.session.turn,
            input_len: request.input_len.unwrap_or(prefix + request.append_len),
            append_len: request.append_len,
        }
    }

    fn candidate(&self, place: usize, worker: &WorkerRecord) -> Candidate {
        let chain: Vec<BlockHash> = self.record.request.prefix_hashes.iter().map(|h| BlockHash(*h)).collect();
        let resident: HashSet<BlockHash> = worker.resident.iter().map(|h| BlockHash(*h)).collect();
        let counted = match self.options.overlap {
            crate::core::options::Overlap::Set => intersection(&chain, &resident),
            crate::core::options::Overlap::Prefix => {
                chain.iter().take_while(|block| resident.contains(block)).count()
            }
        };
        Candidate {
            id: WorkerId(place as u32),
            overlap: worker.overlap.unwrap_or(counted as u32),
            resident: worker.sessions.get(&self.record.session.id).copied().unwrap_or(0),
            inflight: worker.inflight,
            assigned: worker.assigned,
            load: worker.load,
            pinned_tokens: worker.pinned_tokens,
            warm: worker.warm.unwrap_or(1.0),
            backup: self.backup(worker),
        }
    }

    fn backup(&self, worker: &WorkerRecord) -> Backup {
        let Some(backup) = &worker.backup else { return Backup::default() };
        let place = |name: &String| self.record.prefill.iter().position(|p| p == name);
        let source = backup.from.as_ref().and_then(place).map(|p| WorkerId(p as u32));
        Backup { tokens: backup.tokens, source }
    }

    fn prefills(&self) -> Vec<PrefillView> {
        let at = |list: &[Tokens], i: usize| list.get(i).copied().unwrap_or(0);
        let view = |i| PrefillView {
            id: WorkerId(i as u32),
            backlog: at(&self.record.prefill_backlog, i),
            held: at(&self.record.prefill_held, i),
        };
        (0..self.record.prefill.len()).map(view).collect()
    }

    /// Algorithm 2 on the recorded state.
    fn admit(&self, id: WorkerId) -> Answer {
        let Some(worker) = self.record.workers.get(id.0 as usize).filter(|w| !w.unreachable) else {
            return Answer::Unreachable;
        };
        let ask = self.ask();
        let candidate = self.candidate(id.0 as usize, worker);
        let terms = worker.terms.unwrap_or(AdmitTerms {
            k_d: worker.k_d,
            used: worker.sessions.values().sum(),
            resident: worker.sessions.contains_key(&self.record.session.id),
            reused: Tokens::from(candidate.overlap) * Tokens::from(self.options.block_tokens),
            append_len: ask.append_len,
            input_len: ask.input_len,
            turn: ask.turn,
            output_reserve: self.record.request.output_reserve,
            evictable: 0,
        });
        match admit(&terms, self.options) {
            Verdict::Admit { mode, .. } => Answer::Admitted {
                mode,
                reuse_blocks: self.options.blocks(terms.reused) as u32,
                terms: Some(terms),
            },
            Verdict::Reject(reason) => Answer::Rejected { reason, terms: Some(terms) },
        }
    }

    fn outcome(&self, session: &SessionState, attempts: &[Attempt], end: End) -> Expect {
        let workers = &self.record.workers;
        let mut inflight: BTreeMap<_, _> = workers.iter().map(|w| (w.id.clone(), w.inflight)).collect();
        let mut assigned: BTreeMap<_, _> = workers.iter().map(|w| (w.id.clone(), w.assigned)).collect();
        let outcome = match end {
            End::Dispatched(plan) => {
                let decode = self.name(plan.decode);
                inflight.entry(decode.clone()).and_modify(|n| *n += 1);
                assigned.entry(decode.clone()).and_modify(|n| *n += 1);
                OutcomeRecord {
                    mode: plan.mode.as_str().into(),
                    prefill: plan.prefill.and_then(|p| self.record.prefill.get(p.0 as usize).cloned()),
                    decode: Some(decode),
                    rung: Some(plan.rung),
                }
            }
            End::Refused(why) => OutcomeRecord { mode: why.into(), prefill: None, decode: None, rung: None },
        };
        Expect {
            attempts: attempts.iter().map(|a| AttemptRecord::of(a, |d| self.name(d))).collect(),
            outcome,
            after: AfterRecord {
                pin: session.pin.map(|id| self.name(id)),
                rejects: session.rejects.iter().map(|(id, n)| (self.name(*id), *n)).collect(),
                inflight,
                assigned,
            },
        }
    }
}

fn print(text: &mut String, record: &Record, found: &Expect) {
    let _ = writeln!(text, "{}: session {} turn {}", record.name, record.session.id, record.session.turn);
    for (i, attempt) in found.attempts.iter().enumerate() {
        let scores: Vec<String> = attempt
            .scores
            .iter()
            .map(|(id, [a, b, c, d])| {
                let mark = if *id == attempt.worker { "*" } else { "" };
                format!("{mark}{id} ({a}, {b}, {c}, {d})")
            })
            .collect();
        let answer = match (attempt.mode, attempt.reason) {
            (Some(mode), _) => format!("admitted, {mode}"),
            (None, Some(reason)) => format!("rejected, {reason}"),
            (None, None) => "no answer".into(),
        };
        let _ = writeln!(text, "  {}. {}  ->  {}: {answer}", i + 1, scores.join("  "), attempt.worker);
    }
    let OutcomeRecord { mode, prefill, decode, rung } = &found.outcome;
    let part = |label: &str, value: Option<&str>| value.map_or(String::new(), |v| format!(" {label} {v}"));
    let _ = writeln!(
        text,
        "  = {mode}{}{}{}",
        part("on", decode.as_deref()),
        part("through", prefill.as_deref()),
        part("by", rung.map(|r| r.as_str())),
    );
}

fn differences(expect: &Expect, found: &Expect) -> Vec<String> {
    let mut lines = Vec::new();
    for i in 0..expect.attempts.len().max(found.attempts.len()) {
        let (e, f) = (expect.attempts.get(i), found.attempts.get(i));
        if e != f {
            lines.push(format!("attempt {}: expected {e:?}, found {f:?}", i + 1));
        }
    }
    let mut found_outcome = found.outcome.clone();
    if expect.outcome.rung.is_none() {
        found_outcome.rung = None;
    }
    if expect.outcome != found_outcome {
        lines.push(format!("outcome: expected {:?}, found {:?}", expect.outcome, found.outcome));
    }
    if expect.after != found.after {
        lines.push(format!("after: expected {:?}, found {:?}", expect.after, found.after));
    }
    lines
}
