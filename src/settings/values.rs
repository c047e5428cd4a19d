//! What a value may be: durations, sizes, numbers and names, each with one spelling; and URLs without their secrets.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// Parses a duration: a whole number and one of the units, nothing else.
///
/// # Errors
/// The rule that was broken.
pub fn parse_duration(text: &str, units: &[(&str, u64)]) -> Result<Duration, String> {
    let rule = || {
        let names: Vec<_> = units.iter().map(|(name, _)| *name).collect();
        format!("must be a whole number and one of {}, such as 30d", names.join(", "))
    };
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    let &(_, milliseconds) = units.iter().find(|(name, _)| *name == unit).ok_or_else(rule)?;
    let number: u64 = number.parse().map_err(|_| rule())?;
    number.checked_mul(milliseconds).map(Duration::from_millis).ok_or_else(|| "is too long".to_owned())
}

/// The units of settings, in milliseconds; those of a horizon on the command line are all but the first.
pub const UNITS: [(&str, u64); 6] =
    [("ms", 1), ("s", 1_000), ("min", 60_000), ("h", 3_600_000), ("d", 86_400_000), ("w", 604_800_000)];

pub(super) fn duration(least: &'static str, most: &'static str) -> impl Fn(&str) -> Result<Duration, String> {
    move |text| {
        let duration = parse_duration(text, &UNITS)?;
        match duration < parse_duration(least, &UNITS)? || duration > parse_duration(most, &UNITS)? {
            true => Err(format!("must be {least} to {most}")),
            false => Ok(duration),
        }
    }
}

pub(super) fn whole<T: FromStr + PartialOrd + Copy + fmt::Display>(
    least: T,
    most: T,
) -> impl Fn(&str) -> Result<T, String> {
    move |text| match text.parse() {
        // As TOML has it: no sign, no leading zero.
        Ok(number) if (least..=most).contains(&number) && number.to_string() == text => Ok(number),
        _ => Err(format!("must be a whole number from {least} to {most}")),
    }
}

pub(super) fn yes_or_no(text: &str) -> Result<bool, &'static str> {
    text.parse().map_err(|_| "must be true or false")
}

pub(super) fn size(text: &str) -> Result<usize, &'static str> {
    const RULE: &str = "must be a whole number and B, KiB or MiB, from 1KiB to 128MiB";

    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    let unit = match unit {
        "B" => 1,
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        _ => return Err(RULE),
    };
    // 128 MiB is the largest message of RabbitMQ 3.
    let size = number.parse::<usize>().ok().and_then(|number| number.checked_mul(unit));
    size.filter(|size| (1 << 10..=128 << 20).contains(size)).ok_or(RULE)
}

/// A broker's name for a queue or an exchange: a short string, some of it needed for the suffixes.
pub(super) fn name(text: &str) -> Result<String, &'static str> {
    match text.len() <= 200 && !text.starts_with("amq.") && !text.chars().any(char::is_control) {
        true => Ok(text.to_owned()),
        false => Err("must have at most 200 bytes, no control characters, and not begin with amq."),
    }
}

/// Writes a URL without its secrets.
///
/// # Errors
/// The formatter's.
pub fn mask(url: &url::Url, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let mut masked = url.clone();
    if url.password().is_some() && masked.set_password(Some("***")).is_err() {
        return f.write_str("***");
    }
    if url.query().is_some() {
        let shown = url.query_pairs().map(|(key, value)| match key.contains("pass") {
            true => (key, "***".into()),
            false => (key, value),
        });
        masked.query_pairs_mut().clear().extend_pairs(shown).finish();
    }
    fmt::Display::fmt(&masked, f)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_whole_number_has_one_spelling() {
        assert_eq!(whole(0, 100)("0"), Ok(0));
        assert_eq!(whole(0, 100)("100"), Ok(100));
        for text in ["", "101", "-1", "+3", "03", "00", "3.0", " 3", "three"] {
            assert!(whole(0, 100)(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_duration_has_one_spelling() {
        for (text, seconds) in [("30d", 2_592_000), ("720h", 2_592_000), ("4w", 2_419_200), ("15min", 900), ("1s", 1)] {
            assert_eq!(parse_duration(text, &UNITS).unwrap().as_secs(), seconds, "{text}");
        }
        for text in [
            "",
            "30",
            "d",
            "30D",
            "-30d",
            "+30d",
            "P30D",
            "4weeks",
            "30 d",
            "1.5d",
            "30d x",
            "abc",
            "99999999999999999999d",
            "99999999999999d",
        ] {
            assert!(parse_duration(text, &UNITS).is_err(), "{text}");
        }
        assert!(parse_duration("5ms", &UNITS[1..]).is_err(), "a horizon knows no milliseconds");
    }
}
