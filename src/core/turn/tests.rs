use std::collections::HashMap;

use super::*;
use crate::core::admit::{AdmitTerms, Verdict, admit};
use crate::core::dispatch::RoundRobin;
use crate::core::ledger::LoadReport;
use proptest::prelude::*;

const COST: CostModel = CostModel::reference();
const K: Tokens = 92_104;

/// A static D: enough state to answer Route and Admit.
#[derive(Debug, Clone)]
struct D {
    overlap: u32,
    used: Tokens,
    resident: bool,
    inflight: u32,
    assigned: u64,
}

fn d(used: Tokens) -> D {
    D { overlap: 0, used, resident: false, inflight: 0, assigned: 0 }
}

fn candidates(ds: &[D]) -> Vec<Candidate> {
    let one = |(i, d): (usize, &D)| Candidate {
        id: WorkerId(i as u32),
        overlap: d.overlap,
        resident: if d.resident { Tokens::from(d.overlap) * 24 } else { 0 },
        inflight: d.inflight,
        assigned: d.assigned,
        load: Some(LoadReport { k_d: K, used: d.used, active: d.used, ..LoadReport::default() }),
        pinned_tokens: 0,
        warm: 1.0,
        backup: Backup::default(),
    };
    ds.iter().enumerate().map(one).collect()
}

fn terms(d: &D, ask: &Ask) -> AdmitTerms {
    AdmitTerms {
        k_d: K,
        used: d.used,
        resident: d.resident,
        reused: Tokens::from(d.overlap) * 24,
        append_len: ask.append_len,
        input_len: ask.input_len,
        turn: ask.turn,
        output_reserve: 0,
        evictable: 0,
    }
}

#[derive(Debug, Clone, PartialEq)]
enum End {
    Dispatched(Mode, u32, Option<u32>),
    Waits,
    Refused(Refused),
}

/// Drives a machine over static workers until it dispatches, waits or refuses.
fn drive(turn: &mut Turn, s: &mut SessionState, ds: &[D], p: usize, rr: &mut RoundRobin, o: &Options) -> End {
    let first = if turn.waited() { Event::WaitOver } else { Event::Begin };
    let mut commands = turn.step(s, first, Rules { options: o, cost: &COST });
    let all = candidates(ds);
    let views: Vec<_> = (0..p).map(|i| PrefillView { id: WorkerId(i as u32), backlog: 0, held: 0 }).collect();
    loop {
        let event = match commands.pop().expect("a machine that waits for nothing") {
            Command::Gather => Event::Fleet { decode: &all, prefill: &views },
            Command::Admit { worker, .. } => {
                let t = terms(&ds[worker.0 as usize], &turn.ask);
                Event::Answer(match admit(&t, o) {
                    Verdict::Admit { mode, .. } => Answer::Admitted { mode, reuse_blocks: 0, terms: Some(t) },
                    Verdict::Reject(reason) => Answer::Rejected { reason, terms: Some(t) },
                })
            }
            Command::PickPrefill => Event::Prefill(rr.pick_prefill(&views, o)),
            Command::PickFallback => {
                let ids: Vec<_> = all.iter().map(|c| c.id).collect();
                let (prefill, decode) = rr.pick_fallback(&views, &ids, o).unwrap();
                Event::FallbackPair { prefill, decode }
            }
            Command::Dispatch(plan) => {
                return End::Dispatched(plan.mode, plan.decode.0, plan.prefill.map(|p| p.0));
            }
            Command::Wait { .. } => return End::Waits,
            Command::Refuse(why) => return End::Refused(why),
            Command::Release { .. } => continue,
        };
        commands = turn.step(s, event, Rules { options: o, cost: &COST });
    }
}

/// A blind Fallback does not go back to the P that failed this request, nor to a D that was busy.
#[test]
fn a_fallback_is_not_blind_to_its_own_past() {
    let (o, ds) = (Options::paper(), [d(K), d(K)]);
    let ask = Ask { turn: 0, input_len: 1000, append_len: 1000 };
    for (p, failure, expected) in [
        (1, Failure::PrefillUnreachable, (1, None)),
        (2, Failure::PrefillUnreachable, (1, Some(1))),
        (0, Failure::Busy, (1, None)),
    ] {
        let (mut turn, mut s) = (Turn::new(ask, 0), SessionState::default());
        let (mut rr, rules) = (RoundRobin::default(), Rules { options: &o, cost: &COST });
        let first = drive(&mut turn, &mut s, &ds, p, &mut rr, &o);
        assert_eq!(first, End::Dispatched(Mode::Fallback, 0, (p > 0).then_some(0)));
        let commands = turn.step(&mut s, Event::Failed(failure), rules);
        assert_eq!(commands[..], [Command::Gather]);
        let views: Vec<_> =
            (0..p).map(|i| PrefillView { id: WorkerId(i as u32), backlog: 0, held: 0 }).collect();
        let mut commands =
            turn.step(&mut s, Event::Fleet { decode: &candidates(&ds), prefill: &views }, rules);
        while let [Command::Admit { .. }] = commands[..] {
            let answer = Answer::Rejected { reason: RejectReason::SessionNotResidentNoCapacity, terms: None };
            commands = turn.step(&mut s, Event::Answer(answer), rules);
        }
        assert_eq!(commands[..], [Command::PickFallback]);
        // The round robin stands at the one that failed again.
        let decode = WorkerId(u32::from(failure != Failure::Busy));
        let pair = Event::FallbackPair { prefill: (p > 0).then_some(WorkerId(0)), decode };
        let commands = turn.step(&mut s, pair, rules);
        let [Command::Dispatch(plan)] = commands[..] else { panic!("{commands:?}") };
        assert_eq!((plan.decode.0, plan.prefill.map(|p| p.0)), expected);
    }
}

/// Algorithm 3, transcribed line by line (with D1's reading of line 4).
fn naive(ask: &Ask, s: &mut SessionState, ds: &[D], p: usize, o: &Options) -> (Mode, u32, Option<u32>) {
    let (mut retries, mut tried) = (0, Vec::new());
    while retries < o.epsilon.unwrap_or(ds.len() as u32) {
        let left: Vec<u32> = (0..ds.len() as u32).filter(|i| !tried.contains(i)).collect();
        let white: Vec<u32> =
            left.iter().copied().filter(|i| s.rejects(WorkerId(*i)) < o.tau_reject).collect();
        let pool = if white.is_empty() {
            let least = left.iter().map(|i| s.rejects(WorkerId(*i))).min();
            left.iter().copied().filter(|i| Some(s.rejects(WorkerId(*i))) == least).collect()
        } else {
            white
        };
        let score = |i: &u32| {
            let (d, sticky) = (&ds[*i as usize], i64::from(s.pin == Some(WorkerId(*i))));
            (
                i64::from(d.overlap) + i64::from(o.alpha) * sticky,
                sticky,
                -i64::from(d.inflight),
                -(d.assigned as i64),
                -i64::from(*i),
            )
        };
        let Some(star) = pool.into_iter().max_by_key(score) else { break };
        let d = &ds[star as usize];
        let cap_ok = (d.used + ask.input_len) as f64 <= (o.rho * K as f64).floor();
        let mode = match (d.resident, ask.append_len <= o.tau_append, cap_ok) {
            (true, true, true) => Some(Mode::Direct),
            (false, _, true) => Some(if ask.turn == 0 { Mode::Seed } else { Mode::Reseed }),
            _ => None,
        };
        if let Some(mode) = mode {
            s.reset(WorkerId(star));
            s.pin = Some(WorkerId(star));
            return (mode, star, (mode != Mode::Direct && p > 0).then_some(0));
        }
        s.bump(WorkerId(star));
        tried.push(star);
        retries += 1;
    }
    (Mode::Fallback, 0, (p > 0).then_some(0))
}

fn ask(turn: u32, input_len: Tokens, append_len: Tokens) -> Ask {
    Ask { turn, input_len, append_len }
}

#[test]
fn production_waits_then_falls_back_to_the_roomiest() {
    let o = Options { rho: 0.95, ..Options::production() };
    let ds = [d(80_000), d(60_000), d(70_000)];
    let mut s = SessionState::default();
    let mut turn = Turn::new(ask(1, 30_000, 30_000), 0);
    assert_eq!(drive(&mut turn, &mut s, &ds, 1, &mut RoundRobin::default(), &o), End::Waits);
    let rules = Rules { options: &o, cost: &COST };
    // Room was freed in vain: it waits again, with every D tried anew.
    assert_eq!(turn.step(&mut s, Event::RoomFreed, rules).as_slice(), [Command::Gather]);
    assert_eq!(s.rejects(WorkerId(0)), 1);
    let mut turn = Turn::new(ask(1, 30_000, 30_000), 0);
    turn.skip_waiting();
    let mut commands = turn.step(&mut s, Event::Begin, rules);
    let all = candidates(&ds);
    while let Some(command) = commands.pop() {
        commands = match command {
            Command::Gather => turn.step(&mut s, Event::Fleet { decode: &all, prefill: &[] }, rules),
            Command::Admit { .. } => {
                let reason = RejectReason::SessionNotResidentNoCapacity;
                turn.step(&mut s, Event::Answer(Answer::Rejected { reason, terms: None }), rules)
            }
            Command::Dispatch(plan) => {
                assert_eq!((plan.mode, plan.decode, plan.admitted), (Mode::Fallback, WorkerId(1), false));
                return;
            }
            other => panic!("{other:?}"),
        };
    }
    panic!("no Fallback");
}

/// D7, production: the D that holds the session is left only after `τ_reject` rejects.
#[test]
fn a_resident_session_waits_for_its_d() {
    let o = Options::production();
    let home = D { overlap: 1000, resident: true, ..d(92_000) };
    let ds = [d(0), home];
    let mut s = SessionState { pin: Some(WorkerId(1)), ..SessionState::default() };
    for _ in 1..o.tau_reject {
        let mut turn = Turn::new(ask(1, 24_500, 500), 0);
        assert_eq!(drive(&mut turn, &mut s, &ds, 1, &mut RoundRobin::default(), &o), End::Waits);
        assert_eq!(turn.attempts().len(), 1);
    }
    let mut turn = Turn::new(ask(1, 24_500, 500), 0);
    let end = drive(&mut turn, &mut s, &ds, 1, &mut RoundRobin::default(), &o);
    assert_eq!(end, End::Dispatched(Mode::Reseed, 0, None));
}

#[test]
fn what_no_d_can_hold_is_refused_and_what_rho_forbids_is_an_exclusive_fallback() {
    let o = Options::production();
    let run = |input| {
        let mut turn = Turn::new(ask(0, input, input), 0);
        drive(&mut turn, &mut SessionState::default(), &[d(0), d(0)], 1, &mut RoundRobin::default(), &o)
    };
    assert_eq!(run(K), End::Refused(Refused::TooLarge));
    assert_eq!(run(K - 1), End::Dispatched(Mode::Fallback, 0, None));
    assert_eq!(run(87_000), End::Dispatched(Mode::Seed, 0, Some(0)));
}

/// D8: what fails before the first byte is released, then placed anew; the pin of a dead D goes.
#[test]
fn a_failed_dispatch_releases_and_gathers() {
    let o = Options::production();
    let rules = Rules { options: &o, cost: &COST };
    let mut s = SessionState { pin: Some(WorkerId(0)), ..SessionState::default() };
    let mut turn = Turn::new(ask(1, 1000, 10), 0);
    let ds = [D { overlap: 41, resident: true, ..d(1000) }, d(0)];
    drive(&mut turn, &mut s, &ds, 1, &mut RoundRobin::default(), &o);
    let commands = turn.step(&mut s, Event::Failed(Failure::DecodeUnreachable), rules);
    let release = Command::Release { worker: WorkerId(0), attempt: 1 };
    assert_eq!(commands.as_slice(), [release, Command::Gather]);
    assert_eq!((s.pin, turn.replaced()), (None, 1));
    // The dead D is no candidate of this request any more.
    let all = candidates(&ds);
    let commands = turn.step(&mut s, Event::Fleet { decode: &all, prefill: &[] }, rules);
    assert_eq!(commands.as_slice(), [Command::Admit { worker: WorkerId(1), attempt: 2 }]);
    // Cancelled while D is being asked: whatever it reserved goes back.
    let commands = turn.step(&mut s, Event::Cancelled, rules);
    assert_eq!(commands.as_slice(), [Command::Release { worker: WorkerId(1), attempt: 2 }]);
    assert!(turn.step(&mut s, Event::Begin, rules).is_empty());
}

/// A P that failed is not used again by this request: another P, then D itself.
#[test]
fn a_failed_p_is_replaced_and_then_done_without() {
    let o = Options::production();
    let rules = Rules { options: &o, cost: &COST };
    let mut s = SessionState::default();
    let mut turn = Turn::new(ask(0, 50_000, 50_000), 0);
    let mut commands = turn.step(&mut s, Event::Begin, rules);
    let all = candidates(&[d(0)]);
    let views = [0, 1].map(|i| PrefillView { id: WorkerId(i), backlog: 0, held: 0 });
    let mut used = Vec::new();
    while let Some(command) = commands.pop() {
        let event = match command {
            Command::Gather => Event::Fleet { decode: &all, prefill: &views },
            Command::Admit { .. } => {
                Event::Answer(Answer::Admitted { mode: Mode::Seed, reuse_blocks: 0, terms: None })
            }
            Command::PickPrefill => Event::Prefill(Some(WorkerId(0))),
            Command::Dispatch(plan) => {
                used.push((plan.rung, plan.prefill.map(|p| p.0)));
                if plan.rung == Rung::Local {
                    break;
                }
                Event::Failed(Failure::PrefillUnreachable)
            }
            Command::Release { .. } => continue,
            other => panic!("{other:?}"),
        };
        commands = turn.step(&mut s, event, rules);
    }
    assert_eq!(used, [(Rung::Full, Some(0)), (Rung::Full, Some(1)), (Rung::Local, None)]);
}

/// "Admit times out": the same request id once more, then a connect failure; never a reject.
#[test]
fn silence_is_asked_again_under_the_same_id() {
    let o = Options::paper();
    let rules = Rules { options: &o, cost: &COST };
    let mut s = SessionState::default();
    let mut turn = Turn::new(ask(0, 1000, 1000), 0);
    turn.step(&mut s, Event::Begin, rules);
    let all = candidates(&[d(0), d(0)]);
    let fleet = Event::Fleet { decode: &all, prefill: &[] };
    let first = Command::Admit { worker: WorkerId(0), attempt: 1 };
    assert_eq!(turn.step(&mut s, fleet, rules).as_slice(), [first]);
    assert_eq!(turn.step(&mut s, Event::Answer(Answer::Silent), rules).as_slice(), [first]);
    let next = Command::Admit { worker: WorkerId(1), attempt: 2 };
    let release = Command::Release { worker: WorkerId(0), attempt: 1 };
    assert_eq!(turn.step(&mut s, Event::Answer(Answer::Silent), rules).as_slice(), [release, next]);
    assert!(s.rejects.is_empty());
}

/// D2, D6, D8: what is remembered of a finished turn, per preset.
#[test]
fn pins_and_counters_after_success() {
    let plan = |mode| Dispatch {
        mode,
        rung: Rung::Append,
        decode: WorkerId(1),
        prefill: None,
        reuse_blocks: 0,
        admitted: mode != Mode::Fallback,
        attempt: 1,
    };
    let after = |mode, resident, o: &Options| {
        let mut s = SessionState { pin: Some(WorkerId(0)), ..SessionState::default() };
        s.bump(WorkerId(2));
        finished(&mut s, &plan(mode), resident, o);
        (s.pin.map(|p| p.0), s.rejects.len())
    };
    let (paper, production) = (Options::paper(), Options::production());
    assert_eq!(after(Mode::Direct, true, &production), (Some(1), 0));
    assert_eq!(after(Mode::Seed, true, &production), (Some(1), 1));
    assert_eq!(after(Mode::Fallback, true, &production), (Some(1), 1));
    assert_eq!(after(Mode::Fallback, false, &production), (Some(0), 1));
    assert_eq!(after(Mode::Fallback, true, &paper), (Some(0), 1));
    // `paper` pinned at admission already; success only clears the counters.
    assert_eq!(after(Mode::Direct, true, &paper), (Some(0), 0));
}

fn any_d() -> impl Strategy<Value = D> {
    (0u32..6, prop_oneof![Just(0u64), 0..K + 10_000], any::<bool>(), 0u32..3, 0u64..3).prop_map(
        |(overlap, used, resident, inflight, assigned)| D { overlap, used, resident, inflight, assigned },
    )
}

fn any_session() -> impl Strategy<Value = SessionState> {
    (proptest::option::of(0u32..5), proptest::collection::vec(0u32..5, 5)).prop_map(|(pin, rejects)| {
        let mut s = SessionState { pin: pin.map(WorkerId), ..SessionState::default() };
        for (i, n) in rejects.into_iter().enumerate() {
            (0..n).for_each(|_| s.bump(WorkerId(i as u32)));
        }
        s
    })
}

proptest! {
    /// The machine under `paper` is Algorithm 3.
    #[test]
    fn paper_equals_the_transcription(
        ds in proptest::collection::vec(any_d(), 1..6), session in any_session(),
        turn in 0u32..3, input in 1u64..90_000, append in 1u64..20_000, p in 0usize..3,
        alpha in 0u32..3, tau_reject in 1u32..4, epsilon in proptest::option::of(1u32..7),
    ) {
        let o = Options { alpha, tau_reject, epsilon, ..Options::paper() };
        let a = ask(turn, input.max(append), append);
        let (mut mine, mut theirs) = (session.clone(), session);
        let mut machine = Turn::new(a, 0);
        let end = drive(&mut machine, &mut mine, &ds, p, &mut RoundRobin::default(), &o);
        let (mode, worker, prefill) = naive(&a, &mut theirs, &ds, p, &o);
        prop_assert_eq!(end, End::Dispatched(mode, worker, prefill));
        let sorted = |s: &SessionState| {
            let mut r = s.rejects.to_vec();
            r.sort();
            (s.pin, r)
        };
        prop_assert_eq!(sorted(&mine), sorted(&theirs));
    }

    /// Theorem 1, across requests (D1): while some D would admit the session, at most |D|·τ_reject rejects
    /// pass before one does, for every ε.
    #[test]
    fn theorem_1_no_starvation(
        mut ds in proptest::collection::vec(any_d(), 1..6), session in any_session(), lucky in 0usize..6,
        epsilon in 1u32..4, tau_reject in 1u32..4,
    ) {
        let o = Options { epsilon: Some(epsilon), tau_reject, ..Options::paper() };
        let lucky = lucky % ds.len();
        ds[lucky] = D { used: 0, resident: false, ..ds[lucky].clone() };
        // Its true precondition: the counters start where a fresh session's do.
        let mut s = SessionState { pin: session.pin, ..SessionState::default() };
        let mut rejected = 0;
        loop {
            let mut turn = Turn::new(ask(1, 9000, 9000), 0);
            let end = drive(&mut turn, &mut s, &ds, 1, &mut RoundRobin::default(), &o);
            let End::Dispatched(mode, ..) = end else { panic!("{end:?}") };
            rejected += turn.attempts().len() as u32 - u32::from(mode != Mode::Fallback);
            if mode != Mode::Fallback { break; }
            prop_assert!(rejected <= ds.len() as u32 * tau_reject);
        }
        prop_assert!(rejected <= ds.len() as u32 * tau_reject);
    }

    /// Theorem 2 with its true preconditions: pinned to d, d holds all of the prefix and nobody holds more
    /// (hashes are chained), d not blacklisted, α ≥ 1, append ≤ τ_append, room: Direct(d), in both presets.
    #[test]
    fn theorem_2_fast_path(
        mut ds in proptest::collection::vec(any_d(), 1..6), home in 0usize..6, prefix in 1u32..1000,
        append in 1u64..8192, production: bool, rejects in 0u32..3,
    ) {
        let o = if production { Options::production() } else { Options::paper() };
        let home = home % ds.len();
        for d in &mut ds { d.overlap = d.overlap.min(prefix); }
        let input = Tokens::from(prefix) * 24 + append;
        let room = o.high_water(K).saturating_sub(input + 24);
        ds[home] = D { overlap: prefix, resident: true, used: room, ..ds[home].clone() };
        let mut s = SessionState { pin: Some(WorkerId(home as u32)), ..SessionState::default() };
        (0..rejects).for_each(|_| s.bump(WorkerId(home as u32)));
        let mut turn = Turn::new(ask(1, input, append), 0);
        let end = drive(&mut turn, &mut s, &ds, 1, &mut RoundRobin::default(), &o);
        prop_assert_eq!(end, End::Dispatched(Mode::Direct, home as u32, None));
        prop_assert_eq!(s.rejects(WorkerId(home as u32)), 0);
    }

    /// Invariants 2 and 3 in their true form, over random histories: a success on d leaves rejects[s, d] = 0;
    /// the pin leaves d only after a reject by d in that very dispatch, or without residency on d; in
    /// production only after `τ_reject` of them since the last success.
    #[test]
    fn migrations_have_a_cause(
        steps in proptest::collection::vec((proptest::collection::vec(any_d(), 4), 1u64..20_000), 1..25),
        production: bool,
    ) {
        let o = if production { Options::production() } else { Options::paper() };
        let mut s = SessionState::default();
        let mut since_success: HashMap<WorkerId, u32> = HashMap::new();
        for (i, (ds, append)) in steps.into_iter().enumerate() {
            let before = s.clone();
            let mut turn = Turn::new(ask(i as u32, 150 + append, append), 0);
            let end = drive(&mut turn, &mut s, &ds, 1, &mut RoundRobin::default(), &o);
            let mut rejected_now = Vec::new();
            for attempt in turn.attempts() {
                if let Some(Answer::Rejected { .. }) = attempt.answer {
                    rejected_now.push(attempt.choice.worker);
                    *since_success.entry(attempt.choice.worker).or_insert(0) += 1;
                }
            }
            let End::Dispatched(mode, worker, _) = end else { continue };
            if mode == Mode::Fallback { continue; }
            let worker = WorkerId(worker);
            turn.step(&mut s, Event::Finished { resident: true }, Rules { options: &o, cost: &COST });
            prop_assert_eq!((s.rejects(worker), s.pin), (0, Some(worker)));
            if mode == Mode::Direct { prop_assert!(s.rejects.is_empty()); }
            if let Some(old) = before.pin.filter(|old| *old != worker) {
                let home = &ds[old.0 as usize];
                let better = ds[worker.0 as usize].overlap > home.overlap;
                let rejects = since_success.get(&old).copied().unwrap_or(0);
                let cause = !home.resident || better || rejected_now.contains(&old)
                    || before.rejects(old) >= o.tau_reject || 48 * home.overlap < 150;
                prop_assert!(cause, "left {old} for {worker} without a cause");
                if production && home.resident && !better && 48 * home.overlap >= 150 {
                    prop_assert!(rejects >= o.tau_reject);
                }
            }
            since_success.insert(worker, 0);
            if mode == Mode::Direct { since_success.clear(); }
        }
    }

    /// Whatever arrives, in whatever order: one dispatch at a time, nothing after the end.
    #[test]
    fn noise_changes_nothing(events in proptest::collection::vec(0u8..12, 1..60), production: bool) {
        let o = if production { Options::production() } else { Options::paper() };
        let rules = Rules { options: &o, cost: &COST };
        let all = candidates(&[d(0), d(90_000)]);
        let mut s = SessionState::default();
        let mut turn = Turn::new(ask(1, 5000, 5000), 0);
        let (mut running, mut over) = (false, false);
        for e in events {
            let reason = RejectReason::NoDCapacity;
            let event = match e {
                0 => Event::Begin,
                1 => Event::Fleet { decode: &all, prefill: &[] },
                2 => Event::Answer(Answer::Admitted { mode: Mode::Reseed, reuse_blocks: 0, terms: None }),
                3 => Event::Answer(Answer::Rejected { reason, terms: None }),
                4 => Event::Answer(Answer::Silent),
                5 => Event::Answer(Answer::Unreachable),
                6 => Event::Prefill(None),
                7 => Event::FallbackPair { prefill: None, decode: WorkerId(0) },
                8 => Event::RoomFreed,
                9 => Event::WaitOver,
                10 => Event::Failed(Failure::Busy),
                _ => Event::Finished { resident: true },
            };
            let commands = turn.step(&mut s, event, rules);
            prop_assert!(!over || commands.is_empty());
            running &= !matches!(event, Event::Failed(_));
            for command in commands {
                match command {
                    Command::Dispatch(_) => { prop_assert!(!running); running = true; }
                    Command::Refuse(_) => over = true,
                    _ => prop_assert!(!running),
                }
            }
            if running && matches!(event, Event::Finished { .. }) { over = true; }
        }
    }
}
