//! The words of the business: ids and quantities, parsed once at the door and never invalid
//! afterwards. No socket and no database here.

use std::fmt;

use serde::{Deserialize, Deserializer, de};
use uuid::Uuid;

/// Parses a UUID in the one spelling that the contract allows: the canonical 36 characters, in any
/// letter case, and neither nil nor max.
///
/// The length decides between the spellings that `Uuid::try_parse` reads: 32 is the simple one, 38 the
/// braced one, 45 the URN.
pub(crate) fn canonical_uuid(text: &str) -> Result<Uuid, &'static str> {
    if text.len() != 36 {
        return Err("must be a UUID of 36 characters");
    }
    let id = Uuid::try_parse(text).map_err(|_| "must be a UUID of hexadecimal digits and hyphens")?;
    if id.is_nil() || id.is_max() {
        return Err("must not be the nil or the max UUID");
    }
    Ok(id)
}

/// Reads a string (and nothing else) of the contract and parses it with `parse`, quoting what was sent,
/// shortened and escaped, when it is refused.
pub(crate) fn deserialize_text<'de, D, T>(
    deserializer: D,
    expected: &'static str,
    parse: impl Fn(&str) -> Result<T, &'static str>,
) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
{
    struct Text<P>(&'static str, P);

    impl<T, P: Fn(&str) -> Result<T, &'static str>> de::Visitor<'_> for Text<P> {
        type Value = T;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str(self.0)
        }

        fn visit_str<E: de::Error>(self, text: &str) -> Result<T, E> {
            (self.1)(text).map_err(|rule| E::custom(format_args!("{rule}, got {}", quote(text))))
        }
    }

    deserializer.deserialize_str(Text(expected, parse))
}

/// Foreign text made harmless for headers and logs: quoted, escaped and cut to 60 characters.
///
/// Everything but ASCII is escaped: what the contract spells in ASCII is often refused for a letter that looks like it.
pub(crate) fn quote(text: &str) -> String {
    const SHOWN: usize = 60; // enough for an id, a name or a number; foreign text is bounded everywhere
    match text.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("\"{}\"… ({} bytes)", text[..end].escape_default(), text.len()),
        None => format!("\"{}\"", text.escape_default()),
    }
}

/// Foreign text made harmless for a line of the log: control characters and quotes escaped, cut to 1,000 characters.
pub(crate) fn harmless(text: &str) -> String {
    text.chars().take(1000).flat_map(char::escape_debug).collect()
}

macro_rules! id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(uuid::Uuid);

        impl $name {
            /// The id's value; ids are equal when their values are.
            pub fn as_uuid(self) -> uuid::Uuid {
                self.0
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                self.0.fmt(f)
            }
        }

        impl<'de> serde::Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                $crate::stock::deserialize_text(deserializer, "a UUID as a string", |text| {
                    $crate::stock::canonical_uuid(text).map(Self)
                })
            }
        }
    };
}
pub(crate) use id;

id! {
    /// An order of the shop.
    OrderId
}
id! {
    /// A product of the shop.
    ProductId
}
id! {
    /// A customer of the shop. Read for the sake of the contract; nothing of it is stored.
    CustomerId
}

/// How much of a product a line reserves: greater than 0, at most 999,999,999.999, with 3 decimals.
///
/// Held as a whole number of thousandths, so that no rounding can happen anywhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Quantity(i64);

impl Quantity {
    /// The quantity in thousandths: 1 to 999,999,999,999.
    pub fn thousandths(self) -> i64 {
        self.0
    }

    /// Parses 1–9 integer digits, optionally followed by a point and 1–3 decimals; the column is
    /// `numeric(12,3)`, which would round a fourth decimal silently.
    fn parse(text: &str) -> Result<Self, &'static str> {
        const RULE: &str = "must be 1 to 9 digits, optionally a point and 1 to 3 decimals";

        let (integer, decimals) = match text.split_once('.') {
            Some((integer, decimals)) if (1..=3).contains(&decimals.len()) => (integer, decimals),
            Some(_) => return Err(RULE),
            None => (text, ""),
        };
        if !(1..=9).contains(&integer.len()) {
            return Err(RULE);
        }
        let mut thousandths = 0;
        for byte in integer.bytes().chain(decimals.bytes()) {
            if !byte.is_ascii_digit() {
                return Err(RULE);
            }
            thousandths = thousandths * 10 + i64::from(byte - b'0');
        }
        for _ in decimals.len()..3 {
            thousandths *= 10;
        }
        if thousandths == 0 {
            return Err("must be greater than 0");
        }
        Ok(Self(thousandths))
    }
}

impl fmt::Display for Quantity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{:03}", self.0 / 1000, self.0 % 1000)
    }
}

impl<'de> Deserialize<'de> for Quantity {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        const EXPECTED: &str = "a decimal as a string, such as \"2.000\" (JSON numbers are rounded on their way)";
        deserialize_text(deserializer, EXPECTED, Self::parse)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quantity_keeps_its_exact_value() {
        for (text, shown) in [
            ("2.000", "2.000"),
            ("2", "2.000"),
            ("2.0", "2.000"),
            ("0.001", "0.001"),
            ("0.010", "0.010"),
            ("9999.999", "9999.999"),
            ("10000", "10000.000"),
            ("0002", "2.000"),
            ("999999999.999", "999999999.999"),
        ] {
            assert_eq!(Quantity::parse(text).map(|q| q.to_string()), Ok(shown.to_owned()), "{text}");
        }
    }

    #[test]
    fn every_other_spelling_of_a_quantity_is_refused() {
        for text in [
            "",
            " ",
            " 2",
            "2 ",
            "2\n",
            "0",
            "0.000",
            "-0",
            "-1",
            "+2",
            ".5",
            "2.",
            "2,000",
            "1,5",
            "0.0001",
            "2.0005",
            "1000000000",
            "999999999.9999",
            "٢",
            "２",
            "0x10",
            "NaN",
            "nan",
            "Infinity",
            "1e3",
            "1.2.3",
            "10000.0000",
        ] {
            assert!(Quantity::parse(text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn an_id_has_one_spelling_and_any_letter_case() {
        let id = "01939c5e-7d4a-7c1b-9a55-3f6c2b1d8e01";
        assert_eq!(canonical_uuid(id), canonical_uuid(&id.to_uppercase()));
        assert!(canonical_uuid(id).is_ok());
        for text in [
            "",
            "01939c5e7d4a7c1b9a553f6c2b1d8e01",
            "{01939c5e-7d4a-7c1b-9a55-3f6c2b1d8e01}",
            "urn:uuid:01939c5e-7d4a-7c1b-9a55-3f6c2b1d8e01",
            "01939c5e-7d4a-7c1b-9a55-3f6c2b1d8e01\n",
            " 1939c5e-7d4a-7c1b-9a55-3f6c2b1d8e01",
            "01939c5e-7d4a-7c1b-9a55-3f6c2b1d8e0g",
            "01939c5e-7d4a-7c1b-9a553-f6c2b1d8e01",
            "00000000-0000-0000-0000-000000000000",
            "ffffffff-ffff-ffff-ffff-ffffffffffff",
        ] {
            assert!(canonical_uuid(text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn quoted_text_is_short_and_harmless() {
        assert_eq!(quote("a\nb\u{1b}"), r#""a\nb\u{1b}""#);
        assert_eq!(quote("v\u{456}ew"), r#""v\u{456}ew""#);
        assert!(quote(&"é".repeat(1000)).len() < 400);
    }
}
