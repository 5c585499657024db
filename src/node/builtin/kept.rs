//! Responses kept for `previous_response_id`: by each response's id, the items of the conversation up to its end.
//! Bounded by count and by bytes; the oldest go first.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use serde_json::Value;
use serde_json::value::RawValue;

use super::super::error::NodeError;

/// Responses kept at most.
const COUNT: usize = 1024;
/// Bytes of items kept at most.
const BYTES: usize = 32 << 20;

/// See the module. Clones share it.
#[derive(Debug, Clone, Default)]
pub struct Kept(Arc<Mutex<Inner>>);

#[derive(Debug, Default)]
struct Inner {
    items: HashMap<String, Arc<str>>,
    order: VecDeque<String>,
    bytes: usize,
}

/// A conversation that is to be kept under its next response.
#[derive(Debug)]
pub struct Keep {
    kept: Kept,
    /// Its items so far, separated by commas.
    items: String,
    /// The response it continues.
    pub previous: Option<String>,
}

impl Kept {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        // Each change is whole before the next begins.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn get(&self, id: &str) -> Option<Arc<str>> {
        self.lock().items.get(id).cloned()
    }

    fn put(&self, id: String, items: String) {
        let mut inner = self.lock();
        inner.bytes += items.len();
        inner.order.push_back(id.clone());
        if let Some(old) = inner.items.insert(id, items.into()) {
            inner.bytes -= old.len();
        }
        while inner.order.len() > COUNT || inner.bytes > BYTES {
            let Some(oldest) = inner.order.pop_front() else { break };
            let gone = inner.items.remove(&oldest).map_or(0, |items| items.len());
            inner.bytes -= gone;
        }
    }

    /// A request body of the Responses API with the conversation it continues in place of its id, and what is to be
    /// kept of it, unless the request says otherwise.
    ///
    /// # Errors
    /// 400: no response with that id is kept.
    pub fn continued(&self, body: Bytes) -> Result<(Bytes, Option<Keep>), NodeError> {
        // What is no such object is refused by who reads it next.
        let Ok(mut members) = serde_json::from_slice::<BTreeMap<Cow<'_, str>, &RawValue>>(&body) else {
            return Ok((body, None));
        };
        let text =
            |raw: &RawValue| serde_json::from_str::<String>(raw.get()).ok().filter(|id| !id.is_empty());
        let previous = members.remove("previous_response_id").and_then(text);
        let Some(mut items) = members.get("input").and_then(|input| items(input)) else {
            return Ok((body, None));
        };
        if let Some(id) = &previous {
            let Some(before) = self.get(id) else {
                let message =
                    "this worker keeps no response with that id: send the whole conversation in `input`";
                return Err(NodeError::bad_field("previous_response_id", message));
            };
            items = join(&before, &items);
        }
        let whole = match previous {
            Some(_) => spliced(&members, &items).into(),
            None => body.clone(),
        };
        let store = members.get("store").is_none_or(|store| store.get() != "false");
        let keep = store.then(|| Keep { kept: self.clone(), items, previous });
        drop(members);
        Ok((whole, keep))
    }
}

impl Keep {
    /// Keeps the conversation with what was answered.
    pub fn put(&self, id: &str, output: &[Value]) {
        let said: Vec<String> = output.iter().map(Value::to_string).collect();
        self.kept.put(id.to_owned(), join(&self.items, &said.join(",")));
    }
}

/// An input as items, without the brackets around them; `None` for what is no input.
fn items(input: &RawValue) -> Option<String> {
    let text = input.get();
    if text.starts_with('"') {
        return Some(format!(r#"{{"role":"user","content":{text}}}"#));
    }
    Some(text.strip_prefix('[')?.strip_suffix(']')?.trim().to_owned())
}

fn join(before: &str, after: &str) -> String {
    let comma = if before.is_empty() || after.is_empty() { "" } else { "," };
    format!("{before}{comma}{after}")
}

fn spliced(members: &BTreeMap<Cow<'_, str>, &RawValue>, items: &str) -> Vec<u8> {
    let mut out = format!("{{\"input\":[{items}]");
    for (name, value) in members.iter().filter(|(name, _)| *name != "input") {
        out += &format!(",{}:{value}", Value::from(&**name));
    }
    out.push('}');
    out.into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn continued(kept: &Kept, body: Value) -> (Value, Option<Keep>) {
        let (whole, keep) = kept.continued(body.to_string().into()).unwrap();
        (serde_json::from_slice(&whole).unwrap(), keep)
    }

    #[test]
    fn a_conversation_goes_on_where_it_was() {
        let kept = Kept::default();
        let (_, keep) = continued(&kept, json!({"model": "m", "input": "a"}));
        keep.unwrap().put("r1", &[json!({"type": "message", "role": "assistant", "content": "b"})]);
        let next = json!({"model": "m", "x\"y": 1, "previous_response_id": "r1", "input": [{"role": "user", "content": "c"}]});
        let (whole, keep) = continued(&kept, next);
        let items = json!([{"role": "user", "content": "a"}, {"type": "message", "role": "assistant", "content": "b"},
            {"role": "user", "content": "c"}]);
        assert_eq!(whole, json!({"model": "m", "x\"y": 1, "input": items}));
        assert_eq!(keep.unwrap().previous.as_deref(), Some("r1"));
        let (_, keep) = continued(&kept, json!({"input": "a", "store": false}));
        assert!(keep.is_none());
        let error = kept
            .continued(json!({"input": "a", "previous_response_id": "no"}).to_string().into())
            .unwrap_err();
        assert_eq!((error.status.as_u16(), error.param.as_deref()), (400, Some("previous_response_id")));
        for other in [json!([]), json!({"input": 7}), json!({"model": "m"})] {
            assert_eq!(continued(&kept, other.clone()).0, other);
        }
    }

    #[test]
    fn it_is_bounded() {
        let kept = Kept::default();
        let most = "x".repeat(BYTES / 3);
        for id in ["a", "b", "c", "d"] {
            kept.put(id.into(), most.clone());
        }
        assert_eq!((kept.get("a"), kept.get("d").map(|items| items.len())), (None, Some(BYTES / 3)));
        for id in 0..COUNT {
            kept.put(id.to_string(), String::new());
        }
        assert_eq!(kept.get("d"), None);
        let inner = kept.lock();
        assert_eq!((inner.items.len(), inner.order.len(), inner.bytes), (COUNT, COUNT, 0));
    }
}
