package main

import (
	"bytes"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"unicode/utf16"
	"unicode/utf8"

	"github.com/epochkv/epochkv/client"
)

// parseJSONLine reads one line of JSON. It is strict: a field it does not know, a field given twice, and a value given twice or not at
// all are errors, since an import that guesses loses data.
//
// The parser is written for this one kind of object. encoding/json takes six times as long, which would be the most
// expensive part of an import; it also takes "KEY" for "key", the last of two equal names, and half a surrogate pair for
// U+FFFD, each of which would store something else than the file says.
func parseJSONLine(line []byte) (record, error) {
	if !utf8.Valid(line) {
		return record{}, errors.New("not UTF-8; bytes belong under key_base64 or value_base64")
	}
	p := lineParser{rest: line}
	r, err := p.object()
	if err != nil {
		return record{}, err
	}
	if p.skipSpace(); len(p.rest) > 0 {
		return record{}, errors.New("unexpected text after the JSON object")
	}
	if len(r.key) == 0 {
		return record{}, errors.New("the key is empty")
	}
	return r, nil
}

// lineParser consumes a line from its front.
type lineParser struct{ rest []byte }

var errUnfinished = errors.New("the JSON object does not end")

func (p *lineParser) skipSpace() {
	for len(p.rest) > 0 && (p.rest[0] == ' ' || p.rest[0] == '\t' || p.rest[0] == '\r' || p.rest[0] == '\n') {
		p.rest = p.rest[1:]
	}
}

// next takes the next byte that is not space, which must be one of allowed: a person would say what.
func (p *lineParser) next(allowed, what string) (byte, error) {
	p.skipSpace()
	if len(p.rest) == 0 {
		return 0, errUnfinished
	}
	c := p.rest[0]
	if strings.IndexByte(allowed, c) < 0 {
		return 0, fmt.Errorf("expected %s, found %.20q", what, p.rest)
	}
	p.rest = p.rest[1:]
	return c, nil
}

func (p *lineParser) object() (record, error) {
	var r record
	var hasKey, hasValue, hasEpoch, hasExpiry, hasLease bool
	if _, err := p.next("{", "a JSON object"); err != nil {
		return r, err
	}
	for separator := byte(','); separator == ','; {
		name, err := p.text()
		if err != nil {
			return r, err
		}
		if _, err := p.next(":", "a colon"); err != nil {
			return r, err
		}
		switch string(name) {
		case "key", "key_base64", "key_hex":
			r.key, err = p.bytes(string(name), &hasKey, "key")
		case "value", "value_base64", "value_hex":
			r.value, err = p.bytes(string(name), &hasValue, "value")
		case "epoch":
			r.epoch, err = p.epoch(&hasEpoch)
		case "expires_at_ms":
			r.expiresAt, err = p.number(&hasExpiry, "expires_at_ms")
		case "lease_id":
			r.lease, err = p.number(&hasLease, "lease_id")
		default:
			err = fmt.Errorf("unknown field %q", name)
		}
		if err != nil {
			return r, err
		}
		if separator, err = p.next(",}", "a comma or the end of the object"); err != nil {
			return r, err
		}
	}
	switch {
	case !hasKey:
		return r, errors.New("no key is given")
	case !hasValue:
		return r, errors.New("no value is given")
	}
	return r, nil
}

// bytes reads a field in the encoding that its name says. It may be given once, in one encoding.
func (p *lineParser) bytes(name string, given *bool, what string) ([]byte, error) {
	if *given {
		return nil, fmt.Errorf("the %s is given twice", what)
	}
	*given = true
	text, err := p.text()
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	switch name[len(what):] {
	case "_base64":
		text, err = base64.StdEncoding.Strict().AppendDecode(nil, text)
	case "_hex":
		text, err = hex.AppendDecode(nil, text)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return text, nil
}

// epoch reads what export wrote with --epochs. Import gives new epochs.
func (p *lineParser) epoch(given *bool) (client.Epoch, error) {
	n, err := p.number(given, "epoch")
	return client.Epoch(n), err
}

// number reads an unsigned integer.
func (p *lineParser) number(given *bool, name string) (uint64, error) {
	if *given {
		return 0, fmt.Errorf("the %s is given twice", name)
	}
	*given = true
	p.skipSpace()
	digits := 0
	for digits < len(p.rest) && p.rest[digits] >= '0' && p.rest[digits] <= '9' {
		digits++
	}
	n, err := strconv.ParseUint(string(p.rest[:digits]), 10, 64)
	if err != nil || digits > 1 && p.rest[0] == '0' {
		return 0, fmt.Errorf("%s: expected a number, found %.20q", name, p.rest)
	}
	p.rest = p.rest[digits:]
	return n, nil
}

// text reads a string. The result is the caller's own.
func (p *lineParser) text() ([]byte, error) {
	if _, err := p.next(`"`, "a string"); err != nil {
		return nil, err
	}
	end := bytes.IndexByte(p.rest, '"')
	if end < 0 {
		return nil, errUnfinished
	}
	// Room for what is there until the first quote: exact but for escapes, which shrink, and escaped quotes, which are rare.
	text := make([]byte, 0, end)
	for {
		plain := 0
		for plain < len(p.rest) && p.rest[plain] >= ' ' && p.rest[plain] != '"' && p.rest[plain] != '\\' {
			plain++
		}
		text = append(text, p.rest[:plain]...)
		if p.rest = p.rest[plain:]; len(p.rest) == 0 {
			return nil, errUnfinished
		}
		switch p.rest[0] {
		case '"':
			p.rest = p.rest[1:]
			return text, nil
		case '\\':
			var err error
			if text, err = p.escape(text); err != nil {
				return nil, err
			}
		default:
			return nil, fmt.Errorf("unescaped control character %q in a string", p.rest[0])
		}
	}
}

// What may follow a backslash, and what it means then.
const (
	escapes        = `"\/bfnrt`
	escapeMeanings = "\"\\/\b\f\n\r\t"
)

// escape reads an escape, with its backslash, and appends what it means.
func (p *lineParser) escape(text []byte) ([]byte, error) {
	if len(p.rest) < 2 {
		return nil, errUnfinished
	}
	c := p.rest[1]
	if c == 'u' {
		return p.unicodeEscape(text)
	}
	at := strings.IndexByte(escapes, c)
	if at < 0 {
		return nil, fmt.Errorf("unknown escape %q", p.rest[:2])
	}
	p.rest = p.rest[2:]
	return append(text, escapeMeanings[at]), nil
}

func (p *lineParser) unicodeEscape(text []byte) ([]byte, error) {
	r, err := p.codeUnit()
	if err != nil {
		return nil, err
	}
	if utf16.IsSurrogate(r) {
		low, err := p.codeUnit()
		if r = utf16.DecodeRune(r, low); err != nil || r == utf8.RuneError {
			return nil, errors.New("half a surrogate pair; bytes belong under key_base64 or value_base64")
		}
	}
	return utf8.AppendRune(text, r), nil
}

// codeUnit reads \uXXXX.
func (p *lineParser) codeUnit() (rune, error) {
	const size = len(`\uXXXX`)
	if len(p.rest) < size || p.rest[0] != '\\' || p.rest[1] != 'u' {
		return 0, errUnfinished
	}
	var unit [2]byte
	if _, err := hex.Decode(unit[:], p.rest[2:size]); err != nil {
		return 0, fmt.Errorf("unknown escape %q", p.rest[:size])
	}
	p.rest = p.rest[size:]
	return rune(unit[0])<<8 | rune(unit[1]), nil
}
