//! What the engines of a fleet can do, as far as it changes a plan: the core never plans the rest, and the rung it
//! takes instead is the turn's reason.

use serde::{Deserialize, Serialize};

/// See the module. By default everything, as the builtin workers can.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Able {
    /// D appends to a session it holds (Direct). Otherwise such a turn is a Reseed: P sends what D lacks.
    pub direct: bool,
    /// D computes prompts itself (`local`). Otherwise every turn needs a P.
    pub local: bool,
    /// D keeps its prefix when P sends the rest (`delta`). Otherwise everything travels (`full`).
    pub delta: bool,
    /// A P sends its backup without computing anything (`restore`). Otherwise it resumes from it (`backup`).
    pub restore: bool,
}

impl Default for Able {
    fn default() -> Self {
        Self::ALL
    }
}

impl Able {
    /// Everything.
    pub const ALL: Self = Self { direct: true, local: true, delta: true, restore: true };
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::cost::{Backup, CostModel};
    use crate::core::ledger::LoadReport;
    use crate::core::options::Options;
    use crate::core::route::{Ask, Candidate, PrefillView, SessionState};
    use crate::core::turn::{Answer, Command, Dispatch, Event, Refused, Rules, Turn};
    use crate::core::types::{Mode, Rung, Tokens, WorkerId};
    use proptest::prelude::*;

    /// The plan for a turn that D admits as `mode`, of which it holds `held` blocks and P `held_p` tokens.
    fn planned(
        able: Able,
        mode: Mode,
        (held, held_p): (u32, Tokens),
        p_up: bool,
        options: &Options,
    ) -> Result<Dispatch, Refused> {
        let cost = CostModel { able, ..CostModel::reference() };
        let rules = Rules { options, cost: &cost };
        let d = Candidate {
            id: WorkerId(0),
            overlap: held,
            resident: Tokens::from(held) * 24,
            inflight: 30,
            assigned: 0,
            load: Some(LoadReport { k_d: 200_000, running: 30, ..LoadReport::default() }),
            pinned_tokens: 0,
            warm: 1.0,
            backup: Backup { tokens: 4000, source: Some(WorkerId(9)) },
        };
        let p = PrefillView { id: WorkerId(9), backlog: 0, held: held_p };
        let fleet = if p_up { vec![p] } else { Vec::new() };
        let ask = Ask { turn: u32::from(mode != Mode::Seed), input_len: 60_000, append_len: 900 };
        let (mut turn, mut session) = (Turn::new(ask, 0), SessionState::default());
        let mut commands = turn.step(&mut session, Event::Begin, rules);
        loop {
            let event = match commands.pop().expect("a machine that waits for nothing") {
                Command::Gather => Event::Fleet { decode: &[d], prefill: &fleet },
                Command::Admit { .. } => {
                    Event::Answer(Answer::Admitted { mode, reuse_blocks: held, terms: None })
                }
                Command::PickPrefill => Event::Prefill(fleet.first().map(|p| p.id)),
                Command::Dispatch(plan) => return Ok(plan),
                Command::Refuse(why) => {
                    assert!(matches!(commands.pop(), Some(Command::Release { .. })), "the lease goes back");
                    return Err(why);
                }
                command => panic!("{command:?}"),
            };
            commands = turn.step(&mut session, event, rules);
        }
    }

    proptest! {
        /// No plan needs what the engines can't do, and there is one whenever something is left.
        #[test]
        fn nothing_impossible_is_planned(
            direct: bool, local: bool, delta: bool, restore: bool, p_up: bool, paper: bool,
            mode in prop::sample::select(vec![Mode::Direct, Mode::Seed, Mode::Reseed]),
            held in 0u32..2400, held_p in 0u64..60_000,
        ) {
            let able = Able { direct, local, delta, restore };
            let options = if paper { Options::paper() } else { Options::production() };
            match planned(able, mode, (held, held_p), p_up, &options) {
                Ok(plan) => {
                    prop_assert_eq!(plan.mode == Mode::Direct, mode == Mode::Direct && direct);
                    prop_assert_eq!(plan.rung == Rung::Append, plan.mode == Mode::Direct);
                    prop_assert!(plan.rung != Rung::Local || local);
                    prop_assert!(plan.rung != Rung::Restore || restore);
                    prop_assert!(plan.rung != Rung::Delta || delta);
                    prop_assert!(!plan.rung.uses_prefill() || plan.prefill.is_some());
                }
                Err(why) => {
                    prop_assert_eq!(why, Refused::NoPrefill);
                    prop_assert!(!local && !p_up);
                }
            }
        }
    }

    /// Without Direct a resident session is a delta seed, whatever P holds.
    #[test]
    fn a_resident_session_is_a_delta_seed_where_d_cannot_append() {
        let able = Able { direct: false, local: false, restore: false, ..Able::ALL };
        let plan = planned(able, Mode::Direct, (2000, 0), true, &Options::production()).unwrap();
        assert_eq!((plan.mode, plan.rung, plan.prefill), (Mode::Reseed, Rung::Delta, Some(WorkerId(9))));
    }
}
