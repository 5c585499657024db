//! `kvc-router identify`: whose turn each recorded request is, and why.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use serde::Deserialize;
use serde_json::{Map, Value, value::RawValue};

use crate::prompt::BadBody;

use super::{Answer, Headers, Incoming, Limits, Registry, Turn};

/// A recorded request.
#[derive(Deserialize)]
struct Step {
    path: String,
    #[serde(default)]
    headers: Map<String, Value>,
    /// Absent with GET and HEAD, which are nobody's turn.
    body: Option<Box<RawValue>>,
    /// Ids the answer created: tool calls, or `resp:` responses.
    #[serde(default)]
    mints: Vec<String>,
    #[serde(default)]
    expect: Map<String, Value>,
}

/// Requests that follow each other, from an empty registry.
#[derive(Deserialize)]
struct Case {
    #[serde(default)]
    name: String,
    steps: Vec<Step>,
}

/// Places recorded requests in order: a JSON list of `{path, headers, body}`, or of `{name, steps}` with
/// expectations. Every request counts as answered. Gives one line per request, and whether all can be routed and
/// all expectations hold.
///
/// # Errors
/// A sentence when `input` has neither form.
pub fn run(input: &str) -> Result<(String, bool), String> {
    let (mut out, mut good) = (String::new(), true);
    let cases = cases(input)?;
    if cases.iter().all(|case| case.steps.is_empty()) {
        return Err("the list holds no request".into());
    }
    for case in cases {
        if !case.name.is_empty() {
            line(&mut out, format_args!("# {}", case.name));
        }
        good &= play(&case, &mut out);
    }
    Ok((out, good))
}

fn cases(input: &str) -> Result<Vec<Case>, String> {
    let list: Vec<&RawValue> =
        serde_json::from_str(input).map_err(|e| format!("expected a JSON list of requests: {e}"))?;
    let is_case = |entry: &RawValue| {
        serde_json::from_str::<BTreeMap<&str, &RawValue>>(entry.get())
            .is_ok_and(|map| map.contains_key("steps"))
    };
    let bad = |i: usize, e: serde_json::Error| format!("entry {i}: {e}");
    if list.first().is_some_and(|entry| is_case(entry)) {
        let parse = |(i, raw): (usize, &&RawValue)| serde_json::from_str(raw.get()).map_err(|e| bad(i, e));
        return list.iter().enumerate().map(parse).collect();
    }
    let parse = |(i, raw): (usize, &&RawValue)| serde_json::from_str(raw.get()).map_err(|e| bad(i, e));
    let steps = list.iter().enumerate().map(parse).collect::<Result<_, _>>()?;
    Ok(vec![Case { name: String::new(), steps }])
}

fn play(case: &Case, out: &mut String) -> bool {
    let mut registry = Registry::new(Limits::default());
    let (mut labels, mut good) = (Labels::default(), true);
    for (i, step) in case.steps.iter().enumerate() {
        match place(&mut registry, step, i as u64) {
            Ok(turn) => {
                let seen = seen(&turn, labels.number(&turn));
                line(out, format_args!("{i} {} {}", step.path, show(&seen)));
                for (key, wanted) in &step.expect {
                    let held = match key.as_str() {
                        "lane" => labels.agree(wanted, &turn),
                        _ => seen.get(key).unwrap_or(&Value::Null) == wanted,
                    };
                    if !held {
                        let got = seen.get(key).unwrap_or(&Value::Null);
                        line(out, format_args!("  differs: {key} is {got}, expected {wanted}"));
                        good = false;
                    }
                }
            }
            Err(bad) => {
                line(out, format_args!("{i} {} 400 {bad}", step.path));
                good = false;
            }
        }
    }
    good
}

fn place(registry: &mut Registry, step: &Step, now: u64) -> Result<Turn, BadBody> {
    let owned = header_values(&step.headers);
    let headers: Vec<(&str, &[u8])> = owned.iter().map(|(n, v)| (n.as_str(), v.as_bytes())).collect();
    let body = step.body.as_deref().map_or("", RawValue::get).as_bytes();
    let incoming = Incoming { path: &step.path, headers: Headers(&headers), body };
    let turn = registry.begin(&incoming, now)?;
    let responses: Vec<&str> = step.mints.iter().filter_map(|id| id.strip_prefix("resp:")).collect();
    let calls: Vec<&str> =
        step.mints.iter().filter(|id| !id.starts_with("resp:")).map(String::as_str).collect();
    let answer = Answer { ok: true, calls: &calls, responses: &responses, ..Answer::default() };
    registry.commit(&turn, &answer, now);
    Ok(turn)
}

/// Headers as they were sent: a list stands for several of one name.
fn header_values(headers: &Map<String, Value>) -> Vec<(String, String)> {
    let mut all = Vec::new();
    for (name, value) in headers {
        let values = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
        let texts = values.iter().map(|v| v.as_str().map_or_else(|| v.to_string(), str::to_owned));
        all.extend(texts.map(|text| (name.to_ascii_lowercase(), text)));
    }
    all
}

/// Lanes are numbered as they appear; expectations may use any labels, as long as equal ones mean one lane.
#[derive(Default)]
struct Labels {
    numbers: BTreeMap<String, usize>,
    wanted: BTreeMap<String, String>,
}

impl Labels {
    fn number(&mut self, turn: &Turn) -> Option<usize> {
        let next = self.numbers.len() + 1;
        (turn.lane > 0).then(|| *self.numbers.entry(turn.session.to_string()).or_insert(next))
    }

    fn agree(&mut self, label: &Value, turn: &Turn) -> bool {
        if label.is_null() || turn.lane == 0 {
            return label.is_null() && turn.lane == 0;
        }
        let (label, session) = (label.to_string(), turn.session.as_str());
        if let Some(bound) = self.wanted.get(&label) {
            return bound == session;
        }
        let free = !self.wanted.values().any(|bound| bound == session);
        self.wanted.insert(label, session.to_owned());
        free
    }
}

/// A turn under the names expectations use.
fn seen(turn: &Turn, lane: Option<usize>) -> Map<String, Value> {
    let fields: [(&str, Value); 12] = [
        ("src", turn.source.clone().into()),
        ("key", turn.key.clone().into()),
        ("strength", turn.strength.as_str().into()),
        ("lane", lane.into()),
        ("how", turn.how.as_str().into()),
        ("t", turn.t.into()),
        ("cls", turn.class.as_str().into()),
        ("parent", turn.parent.clone().into()),
        ("reuse_items", turn.reuse_items.into()),
        ("append_items", turn.append_items.into()),
        ("append_bytes", turn.append_bytes.into()),
        ("one_shot", turn.one_shot.into()),
    ];
    fields.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

fn show(seen: &Map<String, Value>) -> String {
    const ORDER: [&str; 12] = [
        "src",
        "key",
        "strength",
        "lane",
        "how",
        "t",
        "cls",
        "parent",
        "reuse_items",
        "append_items",
        "append_bytes",
        "one_shot",
    ];
    let word = |name: &&str| match seen.get(*name) {
        None | Some(Value::Null) => format!("{name}=-"),
        Some(Value::String(text)) => format!("{name}={text}"),
        Some(value) => format!("{name}={value}"),
    };
    ORDER.iter().map(word).collect::<Vec<_>>().join(" ")
}

/// Writing to a string cannot fail.
fn line(out: &mut String, text: std::fmt::Arguments<'_>) {
    let _ = writeln!(out, "{text}");
}
