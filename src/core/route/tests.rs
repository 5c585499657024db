use super::*;
use crate::core::cost::Backup;
use crate::core::ledger::LoadReport;
use proptest::prelude::*;

const COST: CostModel = CostModel::reference();

fn candidate(id: u32) -> Candidate {
    Candidate {
        id: WorkerId(id),
        overlap: 0,
        resident: 0,
        inflight: 0,
        assigned: 0,
        load: Some(LoadReport { k_d: 92_104, ..LoadReport::default() }),
        pinned_tokens: 0,
        warm: 1.0,
        backup: Backup::default(),
    }
}

fn ask(input_len: Tokens) -> Ask {
    Ask { turn: 1, input_len, append_len: 100 }
}

fn pinned(id: u32) -> SessionState {
    SessionState { pin: Some(WorkerId(id)), ..SessionState::default() }
}

fn paper(session: &SessionState, tried: &[WorkerId], candidates: &[Candidate]) -> Option<(u32, Rule)> {
    let choice = route(&ask(1000), session, tried, candidates, &[], &Options::paper(), &COST)?;
    Some((choice.worker.0, choice.rule))
}

fn production(ask: &Ask, session: &SessionState, candidates: &[Candidate]) -> Option<(u32, Rule)> {
    let choice = route(ask, session, &[], candidates, &[], &Options::production(), &COST)?;
    Some((choice.worker.0, choice.rule))
}

/// R1: everything equal, the lowest id.
#[test]
fn ties_go_to_the_lowest_id() {
    let c = [candidate(2), candidate(0), candidate(1)];
    assert_eq!(paper(&SessionState::default(), &[], &c), Some((0, Rule::Score)));
    assert_eq!(production(&ask(1000), &SessionState::default(), &c), Some((0, Rule::Placement)));
}

/// R2, an erratum of the specification: with α = 1 a single hit does not beat a pure sticky candidate.
#[test]
fn one_hit_loses_to_the_pin_and_two_hits_win() {
    let hits = |n| [candidate(0), Candidate { overlap: n, ..candidate(1) }];
    assert_eq!(paper(&pinned(0), &[], &hits(1)), Some((0, Rule::Score)));
    assert_eq!(paper(&pinned(0), &[], &hits(2)), Some((1, Rule::Score)));
}

#[test]
fn less_inflight_then_less_assigned_breaks_ties() {
    let c = [Candidate { inflight: 1, ..candidate(0) }, Candidate { assigned: 9, ..candidate(1) }];
    assert_eq!(paper(&SessionState::default(), &[], &c), Some((1, Rule::Score)));
    let c = [Candidate { assigned: 9, ..candidate(0) }, Candidate { assigned: 8, ..candidate(1) }];
    assert_eq!(paper(&SessionState::default(), &[], &c), Some((1, Rule::Score)));
}

/// R5: all blacklisted: the least rejected of those not tried, then the usual score.
#[test]
fn the_degenerate_branch_skips_the_tried() {
    let mut s = SessionState::default();
    s.rejects.extend([(WorkerId(0), 3), (WorkerId(1), 4), (WorkerId(2), 4)]);
    let c = [candidate(0), Candidate { inflight: 2, ..candidate(1) }, candidate(2)];
    assert_eq!(paper(&s, &[], &c), Some((0, Rule::LeastRejected)));
    assert_eq!(paper(&s, &[WorkerId(0)], &c), Some((2, Rule::LeastRejected)));
    assert_eq!(paper(&s, &[WorkerId(0), WorkerId(2)], &c), Some((1, Rule::LeastRejected)));
    assert_eq!(paper(&s, &[WorkerId(0), WorkerId(1), WorkerId(2)], &c), None);
}

/// R4: one shared system prompt of 620 blocks. Algorithm 1 sends every new session to the worker that holds
/// it; placement does not.
#[test]
fn a_shared_prefix_does_not_pile_up() {
    let holder = Candidate { overlap: 620, inflight: 20, pinned_tokens: 80_000, ..candidate(0) };
    let c = [holder, candidate(1), candidate(2)];
    let new = Ask { turn: 0, input_len: 20_000, append_len: 20_000 };
    assert_eq!(paper(&SessionState::default(), &[], &c), Some((0, Rule::Score)));
    assert_eq!(production(&new, &SessionState::default(), &c), Some((1, Rule::Placement)));
}

/// R6: a resident session stays with its pin however full or busy that is.
#[test]
fn capacity_never_moves_a_resident_session() {
    let full = LoadReport { k_d: 92_104, used: 92_000, active: 92_000, running: 40, ..LoadReport::default() };
    let home = Candidate { overlap: 400, resident: 9600, inflight: 40, load: Some(full), ..candidate(2) };
    let c = [candidate(0), candidate(1), home];
    assert_eq!(production(&ask(9700), &pinned(2), &c), Some((2, Rule::Score)));
}

/// A pin whose KV is mostly gone is only a preference.
#[test]
fn a_pin_without_residency_is_placed_by_cost() {
    let crowded = Candidate { overlap: 10, resident: 240, inflight: 30, ..candidate(0) };
    let c = [crowded, candidate(1)];
    assert_eq!(production(&ask(50_000), &pinned(0), &c), Some((1, Rule::Placement)));
    let quiet = [Candidate { inflight: 0, ..crowded }, candidate(1)];
    assert_eq!(production(&ask(50_000), &pinned(0), &quiet), Some((0, Rule::Placement)));
}

/// Cold workers are ramped up, full ones avoided, missing load reports survived.
#[test]
fn placement_weighs_warmth_room_and_missing_signals() {
    let new = SessionState::default();
    let cold = [Candidate { warm: 0.0, ..candidate(0) }, Candidate { inflight: 3, ..candidate(1) }];
    assert_eq!(production(&ask(5000), &new, &cold), Some((1, Rule::Placement)));
    let full = LoadReport { k_d: 92_104, active: 88_000, ..LoadReport::default() };
    let c = [Candidate { load: Some(full), ..candidate(0) }, Candidate { inflight: 20, ..candidate(1) }];
    assert_eq!(production(&ask(5000), &new, &c), Some((1, Rule::Placement)));
    let blind =
        [Candidate { load: None, inflight: 1, ..candidate(0) }, Candidate { load: None, ..candidate(1) }];
    assert_eq!(production(&ask(5000), &new, &blind), Some((1, Rule::Placement)));
}

/// Algorithm 1, transcribed line by line.
fn naive(session: &SessionState, tried: &[WorkerId], all: &[Candidate], o: &Options) -> Option<WorkerId> {
    let d: Vec<&Candidate> = all.iter().filter(|c| !tried.contains(&c.id)).collect();
    let blacklisted = |c: &Candidate| session.rejects(c.id) >= o.tau_reject;
    let mut c: Vec<&Candidate> = d.iter().copied().filter(|c| !blacklisted(c)).collect();
    if c.is_empty() {
        let least = d.iter().map(|c| session.rejects(c.id)).min()?;
        c = d.into_iter().filter(|c| session.rejects(c.id) == least).collect();
    }
    let mut best: Option<(&Candidate, [i64; 4])> = None;
    for c in c {
        let sticky = if session.pin == Some(c.id) { 1 } else { 0 };
        let score = [
            i64::from(c.overlap) + i64::from(o.alpha) * sticky,
            sticky,
            -i64::from(c.inflight),
            -(c.assigned as i64),
        ];
        let better = match &best {
            None => true,
            Some((b, s)) => score > *s || (score == *s && c.id < b.id),
        };
        if better {
            best = Some((c, score));
        }
    }
    best.map(|(c, _)| c.id)
}

proptest! {
    #[test]
    fn route_equals_the_transcription(
        workers in proptest::collection::vec((0u32..4, 0u32..3, 0u64..3, 0u32..5, any::<bool>()), 1..7),
        pin in proptest::option::of(0u32..7), alpha in 0u32..4, tau_reject in 1u32..4,
    ) {
        let o = Options { alpha, tau_reject, ..Options::paper() };
        let mut session = SessionState { pin: pin.map(WorkerId), ..SessionState::default() };
        let mut tried = Vec::new();
        let mut all = Vec::new();
        for (i, (overlap, inflight, assigned, rejects, is_tried)) in workers.into_iter().enumerate() {
            let id = WorkerId(i as u32);
            all.push(Candidate { overlap, inflight, assigned, ..candidate(i as u32) });
            for _ in 0..rejects { session.bump(id); }
            if is_tried { tried.push(id); }
        }
        let choice = route(&ask(1000), &session, &tried, &all, &[], &o, &COST);
        prop_assert_eq!(choice.as_ref().map(|c| c.worker), naive(&session, &tried, &all, &o));
        prop_assert_eq!(choice.is_none(), tried.len() == all.len());
    }

    /// Placement never leaves the candidates and never picks a worker that is worse in everything.
    #[test]
    fn placement_is_not_dominated(
        loads in proptest::collection::vec((0u32..20, 0u64..90_000, 0u64..90_000, 0u64..50_000), 2..6),
        input in 1000u64..80_000,
    ) {
        let all: Vec<Candidate> = loads.iter().enumerate().map(|(i, (inflight, active, pinned_tokens, queued))| {
            let load = LoadReport { k_d: 92_104, active: *active, queued_tokens: *queued, ..LoadReport::default() };
            Candidate { inflight: *inflight, load: Some(load), pinned_tokens: *pinned_tokens, ..candidate(i as u32) }
        }).collect();
        let (chosen, _) = production(&ask(input), &SessionState::default(), &all).unwrap();
        let key = |c: &Candidate| {
            let l = c.load.unwrap();
            (c.inflight, l.active, c.pinned_tokens, l.queued_tokens)
        };
        let mine = key(&all[chosen as usize]);
        for other in &all {
            let k = key(other);
            let better = k.0 < mine.0 && k.1 < mine.1 && k.2 < mine.2 && k.3 < mine.3;
            prop_assert!(!better, "{:?} beats the chosen {:?}", k, mine);
        }
    }
}
