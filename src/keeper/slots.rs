//! Engines with fixed slots, each with the KV of one sequence (llama.cpp). The keeper chooses the slot, so it knows
//! which session a new one costs.

use crate::core::types::{Millis, SessionId};

#[derive(Debug, Clone, Default)]
struct Slot {
    /// Whose KV it has.
    session: Option<SessionId>,
    /// The turn that runs or will run on it.
    turn: Option<String>,
    used: Millis,
}

/// See the module.
#[derive(Debug)]
pub struct Slots(Vec<Slot>);

impl Slots {
    /// `count` empty slots.
    pub fn new(count: u32) -> Self {
        Self(vec![Slot::default(); count as usize])
    }

    /// The slot for a turn: its session's own, else an empty one, else the one used longest ago. `None`: all run.
    fn find(&self, session: &SessionId) -> Option<usize> {
        let free = self.0.iter().enumerate().filter(|(_, slot)| slot.turn.is_none());
        let rank = |slot: &Slot| (slot.session.as_ref() != Some(session), slot.session.is_some(), slot.used);
        free.min_by_key(|(_, slot)| rank(slot)).map(|(place, _)| place)
    }

    /// Whether a turn of `session` finds a slot.
    pub fn has_room(&self, session: &SessionId) -> bool {
        self.find(session).is_some()
    }

    /// Gives a slot to a turn. Returns it and the session that loses it.
    pub fn take(&mut self, session: &SessionId, turn: &str, now: Millis) -> Option<(u32, Option<SessionId>)> {
        let place = self.find(session)?;
        let slot = &mut self.0[place];
        let lost = slot.session.take_if(|held| held != session);
        slot.turn = Some(turn.to_owned());
        slot.used = now;
        Some((place as u32, lost))
    }

    /// Ends a turn. `kept`: whose KV is in its slot now; `None`: whoever's it was before.
    pub fn leave(&mut self, turn: &str, kept: Option<&SessionId>, now: Millis) {
        let Some(place) = self.0.iter().position(|slot| slot.turn.as_deref() == Some(turn)) else { return };
        if let Some(session) = kept {
            // A session whose turns overlap has two slots; the later one counts.
            for slot in self.0.iter_mut().filter(|slot| slot.session.as_ref() == Some(session)) {
                slot.session = None;
            }
            self.0[place].session = Some(session.clone());
        }
        self.0[place].turn = None;
        self.0[place].used = now;
    }

    /// Slots with a turn.
    pub fn busy(&self) -> usize {
        self.0.iter().filter(|slot| slot.turn.is_some()).count()
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.0.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_session_stays_in_its_slot_and_the_oldest_gives_way() {
        let mut slots = Slots::new(2);
        let s = |name: &str| SessionId::new(name);
        assert_eq!(slots.take(&s("a"), "1", 1), Some((0, None)));
        slots.leave("1", Some(&s("a")), 2);
        assert_eq!(slots.take(&s("b"), "2", 3), Some((1, None)));
        slots.leave("2", Some(&s("b")), 4);
        assert_eq!(slots.take(&s("a"), "3", 5), Some((0, None)));
        assert_eq!(slots.take(&s("c"), "4", 6), Some((1, Some(s("b")))));
        assert!(!slots.has_room(&s("a")) && slots.busy() == 2);
        slots.leave("4", None, 7);
        slots.leave("3", Some(&s("a")), 8);
        // Slot 1 has nobody's KV: it goes before a's.
        assert_eq!(slots.take(&s("d"), "5", 9), Some((1, None)));
        assert_eq!(slots.take(&s("e"), "6", 10), Some((0, Some(s("a")))));
        assert_eq!(slots.take(&s("f"), "7", 11), None);
    }

    #[test]
    fn overlapping_turns_of_a_session_leave_it_one_slot() {
        let (mut slots, a) = (Slots::new(3), SessionId::new("a"));
        slots.take(&a, "1", 1);
        slots.take(&a, "2", 2);
        slots.leave("1", Some(&a), 3);
        slots.leave("2", Some(&a), 4);
        assert_eq!(slots.0.iter().filter(|slot| slot.session.is_some()).count(), 1);
        assert_eq!(slots.take(&a, "3", 5), Some((1, None)));
    }
}
