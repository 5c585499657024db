//! Reading a body's fields: borrowed, and with errors that name the place.

use std::borrow::Cow;
use std::fmt;

use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;

use crate::prompt::BadBody;

pub(super) type Result<T> = std::result::Result<T, BadBody>;

/// The members of a body in order, unread.
#[derive(Debug)]
pub(super) struct Members<'a>(pub Vec<(Cow<'a, str>, &'a RawValue)>);

impl<'a> Members<'a> {
    /// Splits a body; of a name that comes twice the last counts, and `null` counts as absent.
    pub fn of(body: &'a [u8]) -> Result<Self> {
        let all: Self = serde_json::from_slice(body).map_err(|e| {
            let what = match e.classify() {
                serde_json::error::Category::Data => "the request body must be a JSON object".to_owned(),
                _ => format!("the request body is not valid JSON ({e})"),
            };
            BadBody { message: what, param: None }
        })?;
        let mut kept: Vec<(Cow<'a, str>, &'a RawValue)> = Vec::with_capacity(all.0.len());
        for (name, value) in all.0 {
            kept.retain(|(known, _)| *known != name);
            if value.get() != "null" {
                kept.push((name, value));
            }
        }
        Ok(Self(kept))
    }

    pub fn get(&self, name: &str) -> Option<&'a RawValue> {
        self.0.iter().find(|(known, _)| known == name).map(|&(_, value)| value)
    }

    /// Reads a member.
    pub fn read<T: Deserialize<'a>>(&self, name: &str) -> Result<Option<T>> {
        self.get(name).map(|raw| read(name, raw)).transpose()
    }

    /// Reads a member that must be there.
    pub fn need<T: Deserialize<'a>>(&self, name: &'static str) -> Result<T> {
        self.read(name)?.ok_or_else(|| BadBody::field(name, "is missing"))
    }
}

impl<'de> Deserialize<'de> for Members<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct All;
        impl<'de> Visitor<'de> for All {
            type Value = Members<'de>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Self::Value, A::Error> {
                let mut members = Vec::new();
                while let Some((Text(name), value)) = map.next_entry()? {
                    members.push((name, value));
                }
                Ok(Members(members))
            }
        }
        deserializer.deserialize_map(All)
    }
}

/// Reads a value; an error says where under `name` it is.
pub(super) fn read<'a, T: Deserialize<'a>>(name: &str, raw: &'a RawValue) -> Result<T> {
    serde_json::from_str(raw.get()).or_else(|_| {
        // Once more, with an eye on the path.
        let mut reader = serde_json::Deserializer::from_str(raw.get());
        serde_path_to_error::deserialize(&mut reader).map_err(|e| {
            let (path, inner) = (e.path().to_string(), e.into_inner().to_string());
            // The line and column are those of the value, not of the body.
            let what = inner.rsplit_once(" at line ").map_or(inner.as_str(), |(what, _)| what);
            let path = if path == "." { String::new() } else { path };
            let dot = if path.is_empty() || path.starts_with('[') { "" } else { "." };
            bad(format!("{name}{dot}{path}"), what)
        })
    })
}

/// The refusal of a field.
pub(super) fn bad(path: impl Into<Cow<'static, str>>, what: &str) -> BadBody {
    let path = path.into();
    BadBody { message: format!("`{path}`: {what}"), param: Some(path) }
}

/// A field's value that an engine with chat completions only cannot serve.
pub(super) fn unsupported<T>(path: impl Into<Cow<'static, str>>, what: impl fmt::Display) -> Result<T> {
    Err(bad(path, &format!("{what} cannot be served: the engine speaks chat completions only")))
}

/// A string that borrows where it can; `Option<Cow<str>>` would always copy.
#[derive(Debug, Clone, Default, PartialEq, serde::Deserialize, serde::Serialize)]
#[serde(transparent)]
pub(super) struct Text<'a>(#[serde(borrow)] pub Cow<'a, str>);

impl std::ops::Deref for Text<'_> {
    type Target = str;
    fn deref(&self) -> &str {
        &self.0
    }
}

/// A text, or a list of parts.
#[derive(Debug)]
pub(super) enum TextOr<'a, T> {
    Text(Cow<'a, str>),
    Parts(Vec<T>),
}

impl<'de: 'a, 'a, T: Deserialize<'de>> Deserialize<'de> for TextOr<'a, T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct Either<'a, T>(std::marker::PhantomData<(&'a (), T)>);
        impl<'de: 'a, 'a, T: Deserialize<'de>> Visitor<'de> for Either<'a, T> {
            type Value = TextOr<'a, T>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string or an array")
            }
            fn visit_borrowed_str<E>(self, text: &'de str) -> std::result::Result<Self::Value, E> {
                Ok(TextOr::Text(Cow::Borrowed(text)))
            }
            fn visit_str<E>(self, text: &str) -> std::result::Result<Self::Value, E> {
                Ok(TextOr::Text(Cow::Owned(text.to_owned())))
            }
            fn visit_string<E>(self, text: String) -> std::result::Result<Self::Value, E> {
                Ok(TextOr::Text(Cow::Owned(text)))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> std::result::Result<Self::Value, A::Error> {
                let mut parts = Vec::with_capacity(seq.size_hint().unwrap_or(0));
                while let Some(part) = seq.next_element()? {
                    parts.push(part);
                }
                Ok(TextOr::Parts(parts))
            }
        }
        deserializer.deserialize_any(Either(std::marker::PhantomData))
    }
}
