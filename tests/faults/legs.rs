//! The legs of turns under way: a turn has one D at a time, and nothing is sent to a worker twice.

use std::sync::Mutex;

use super::net::{Host, Net};

#[derive(Debug)]
struct Leg {
    /// Gateway and turn, without the attempt.
    turn: String,
    id: String,
    kind: &'static str,
    node: Host,
    session: String,
    open: bool,
    busy: bool,
    answered: bool,
}

/// See the module.
#[derive(Debug, Default)]
pub struct Legs(Mutex<Vec<Leg>>);

fn between<'a>(text: &'a str, from: &str, to: char) -> Option<&'a str> {
    let at = text.find(from)? + from.len();
    text[at..].split(to).next()
}

impl Net {
    /// A gateway sends a request. `before`: the leg this connection carried until now.
    pub fn leg_begins(&self, _gateway: Host, node: Host, head: &[u8], before: Option<u64>) -> Option<u64> {
        self.leg_ends(before);
        let text = String::from_utf8_lossy(head);
        let id = between(&text, "x-request-id: ", '\r')?.to_owned();
        let kind = ["decode", "prefill", "restore"]
            .into_iter()
            .find(|k| text.contains(&format!("\"leg\":\"{k}\"")))?;
        let turn = id.rsplit_once('-')?.0.to_owned();
        let mut legs = self.legs.0.lock().unwrap();
        let mut problems = Vec::new();
        if legs.iter().any(|l| l.id == id && l.node == node && l.kind == kind) {
            problems.push(format!("leg {kind} {id} was sent to node {} twice", node.0));
        }
        if kind == "decode" {
            if legs.iter().any(|l| l.turn == turn && l.kind == kind && l.open) {
                problems.push(format!("turn {turn} runs at two workers"));
            }
            if legs.iter().any(|l| l.turn == turn && l.kind == kind && l.node == node && l.busy) {
                problems.push(format!("turn {turn} asks node {} again, which was busy", node.0));
            }
        }
        let session = between(&text, "\"session\":\"", '"').and_then(|s| s.split_once('/'));
        let session = session.map_or_else(String::new, |(_, public)| public.to_owned());
        legs.push(Leg { turn, id, kind, node, session, open: true, busy: false, answered: false });
        let place = legs.len() as u64 - 1;
        drop(legs);
        self.trace.push("leg", node.0.into(), kind.len() as u64);
        problems.into_iter().for_each(|problem| self.rules.violated(problem));
        Some(place)
    }

    /// The worker's status. Returns whether that ends the leg.
    pub fn leg_answers(&self, leg: Option<u64>, status: u16) -> bool {
        self.trace.push("status", leg.unwrap_or(0), status.into());
        let mut legs = self.legs.0.lock().unwrap();
        let Some(leg) = leg.and_then(|leg| legs.get_mut(leg as usize)) else { return false };
        leg.busy |= status == 429 || status == 503;
        leg.open &= status < 300;
        leg.answered = status == 200;
        !leg.open
    }

    /// A session was served: by the worker its answer names, or by the one that sent the rest of it.
    pub fn serves(&self, session: &str, named: &str) {
        self.rules.served(session, named);
        let legs = self.legs.0.lock().unwrap();
        let last = legs.iter().rev().find(|l| l.kind == "decode" && l.answered && l.session == session);
        if let Some(last) = last {
            self.rules.served(session, &self.nodes[last.node.0 as usize].name);
        }
    }

    /// The connection is closed, or carries something else.
    pub fn leg_ends(&self, leg: Option<u64>) {
        if let Some(leg) = leg {
            self.legs.0.lock().unwrap()[leg as usize].open = false;
        }
    }
}
