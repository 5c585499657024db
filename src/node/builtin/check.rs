//! What a body may say besides its prompt. Engines refuse a wrong type by its field's name; so does this one.

use std::borrow::Cow;
use std::collections::BTreeMap;

use serde_json::value::RawValue;

use crate::prompt::{Api, BadBody};

/// What a field may hold; `null` counts as absent.
#[derive(Debug, Clone, Copy)]
enum Want {
    Flag,
    /// A whole number, at least this.
    Count(u64),
    /// A number within these.
    Number(f64, f64),
    Text,
    List,
    Object,
    TextOrList,
}

const ANY_OPENAI: &[(&str, Want)] = &[
    ("stream", Want::Flag),
    ("temperature", Want::Number(0.0, 2.0)),
    ("top_p", Want::Number(0.0, 1.0)),
    ("user", Want::Text),
    ("metadata", Want::Object),
    ("stream_options", Want::Object),
];

const CHAT: &[(&str, Want)] = &[
    ("max_tokens", Want::Count(1)),
    ("max_completion_tokens", Want::Count(1)),
    ("n", Want::Count(1)),
    ("stop", Want::TextOrList),
    ("presence_penalty", Want::Number(-2.0, 2.0)),
    ("frequency_penalty", Want::Number(-2.0, 2.0)),
    ("tools", Want::List),
    ("parallel_tool_calls", Want::Flag),
];

const RESPONSES: &[(&str, Want)] = &[
    ("max_output_tokens", Want::Count(1)),
    ("instructions", Want::TextOrList),
    ("tools", Want::List),
    ("parallel_tool_calls", Want::Flag),
    ("store", Want::Flag),
    ("previous_response_id", Want::Text),
    ("include", Want::List),
];

const MESSAGES: &[(&str, Want)] = &[
    ("stream", Want::Flag),
    ("max_tokens", Want::Count(1)),
    ("temperature", Want::Number(0.0, 1.0)),
    ("top_p", Want::Number(0.0, 1.0)),
    ("top_k", Want::Count(0)),
    ("stop_sequences", Want::List),
    ("system", Want::TextOrList),
    ("tools", Want::List),
    ("tool_choice", Want::Object),
    ("metadata", Want::Object),
    ("thinking", Want::Object),
];

/// Checks the fields of a body that is known to be an object.
///
/// # Errors
/// [`BadBody`] names the first field of a wrong type or out of its range.
pub fn check(api: Api, body: &[u8]) -> Result<(), BadBody> {
    // What is no such object has been refused before.
    let Ok(members) = serde_json::from_slice::<BTreeMap<Cow<'_, str>, &RawValue>>(body) else {
        return Ok(());
    };
    let tables: [&[(&'static str, Want)]; 2] = match api {
        Api::Chat | Api::Completions => [ANY_OPENAI, CHAT],
        Api::Responses => [ANY_OPENAI, RESPONSES],
        Api::Messages => [MESSAGES, &[]],
    };
    for &(name, want) in tables.into_iter().flatten() {
        let value = members.get(name).map(|raw| raw.get()).filter(|raw| *raw != "null");
        if let Some(value) = value.filter(|value| !want.takes(value)) {
            return Err(refused(name, value, want));
        }
    }
    Ok(())
}

impl Want {
    fn takes(self, value: &str) -> bool {
        let begins = |with: &[char]| value.starts_with(with);
        match self {
            Self::Flag => matches!(value, "true" | "false"),
            Self::Count(least) => value.parse::<u64>().is_ok_and(|n| n >= least),
            Self::Number(least, most) => value.parse::<f64>().is_ok_and(|n| (least..=most).contains(&n)),
            Self::Text => begins(&['"']),
            Self::List => begins(&['[']),
            Self::Object => begins(&['{']),
            Self::TextOrList => begins(&['"', '[']),
        }
    }

    fn words(self) -> String {
        match self {
            Self::Flag => "true or false".into(),
            Self::Count(least) => format!("a whole number of at least {least}"),
            Self::Number(least, most) => format!("a number from {least} to {most}"),
            Self::Text => "a string".into(),
            Self::List => "an array".into(),
            Self::Object => "an object".into(),
            Self::TextOrList => "a string or an array".into(),
        }
    }
}

fn refused(name: &'static str, value: &str, want: Want) -> BadBody {
    // A client's text may be long; the message need not be.
    let shown: String = value.chars().take(40).collect();
    let more = if shown.len() < value.len() { "…" } else { "" };
    let message = format!("`{name}` must be {}, not {shown}{more}", want.words());
    BadBody { message, param: Some(Cow::Borrowed(name)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrong_types_are_refused_by_name_and_null_is_absent() {
        let param = |api, body: &str| check(api, body.as_bytes()).err().and_then(|bad| bad.param);
        let cases = [
            (Api::Chat, r#"{"max_tokens":"9"}"#, Some("max_tokens")),
            (Api::Chat, r#"{"max_tokens":0}"#, Some("max_tokens")),
            (Api::Chat, r#"{"max_completion_tokens":1.5}"#, Some("max_completion_tokens")),
            (Api::Chat, r#"{"stream":"true"}"#, Some("stream")),
            (Api::Chat, r#"{"n":-1}"#, Some("n")),
            (Api::Completions, r#"{"temperature":3}"#, Some("temperature")),
            (Api::Responses, r#"{"temperature":"hot"}"#, Some("temperature")),
            (Api::Responses, r#"{"max_output_tokens":[]}"#, Some("max_output_tokens")),
            (Api::Responses, r#"{"previous_response_id":7}"#, Some("previous_response_id")),
            (Api::Messages, r#"{"temperature":1.5}"#, Some("temperature")),
            (Api::Messages, r#"{"stop_sequences":"x"}"#, Some("stop_sequences")),
            (Api::Messages, r#"{"top_k":-1}"#, Some("top_k")),
            (Api::Chat, r#"{"max_tokens":null,"stream":null,"temperature":0.7,"stop":"x","n":1}"#, None),
            (Api::Messages, r#"{"max_tokens":10,"n":"not its field"}"#, None),
        ];
        for (api, body, expected) in cases {
            assert_eq!(param(api, body).as_deref(), expected, "{body}");
        }
        let long = format!(r#"{{"stream":"{}"}}"#, "é".repeat(500));
        assert!(check(Api::Chat, long.as_bytes()).unwrap_err().message.chars().count() < 100);
    }
}
