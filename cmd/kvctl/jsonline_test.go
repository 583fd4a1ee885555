package main

import (
	"strings"
	"testing"
)

func TestLinesThatMeanTwoThingsAreRefused(t *testing.T) {
	for line, complaint := range map[string]string{
		`{"key":"k","value":"\ud800"}`:                    "half a surrogate pair",
		`{"key":"k","value":"\ud800\u0041"}`:              "half a surrogate pair",
		`{"key":"k","value":"\udc00\ud800"}`:              "half a surrogate pair",
		`{"key":"k","key":"l","value":"v"}`:               "the key is given twice",
		`{"key":"k","key_hex":"6b","value":"v"}`:          "the key is given twice",
		`{"key":"k","value":"v","value_base64":"dg=="}`:   "the value is given twice",
		`{"Key":"k","value":"v"}`:                         "unknown field",
		`{"key":"k","value":"v","epoch":1,"epoch":2}`:     "the epoch is given twice",
		`{"key":"k","value":"v","epoch":-1}`:              "epoch: expected a number",
		`{"key":"k","value":"v","epoch":1.5}`:             "expected a comma",
		`{"key":"k","value_base64":"dg"}`:                 "value_base64: ",
		`{"key":"k","value_base64":"dh=="}`:               "value_base64: ", // bits that no byte has
		`{"key":"k","value_hex":"abc"}`:                   "value_hex: ",
		"{\"key\":\"k\",\"value\":\"a\tb\"}":              "unescaped control character",
		"{\"key\":\"k\",\"value\":\"\xff\"}":              "not UTF-8",
		`{"key":"k","value":"\x"}`:                        "unknown escape",
		`{"key":"k","value":"v",}`:                        "expected a string",
		`{"key":"k","value":"v"`:                          "does not end",
		`{"key":"k","value":"v`:                           "does not end",
		`{"key":"k","value":"\u00`:                        "does not end",
		`{}`:                                              "expected a string",
		`{"key":"k","value":null}`:                        "expected a string",
		`{"key":"k","value":"v"}{"key":"k2","value":"v"}`: "unexpected text",
	} {
		if r, err := parseJSONLine([]byte(line)); err == nil {
			t.Errorf("%s was taken as %q, %q", line, r.key, r.value)
		} else if !strings.Contains(err.Error(), complaint) {
			t.Errorf("%s: %v; want something about %q", line, err, complaint)
		}
	}
}

func TestEveryEscapeMeansWhatJSONSays(t *testing.T) {
	r, err := parseJSONLine([]byte(`{"epoch":0,"value":"\"\\\/\b\f\n\r\t\u00e9\ud83d\ude00\ufffd","key_hex":"00fF"}`))
	if err != nil || string(r.value) != "\"\\/\b\f\n\r\té😀\ufffd" || string(r.key) != "\x00\xff" {
		t.Errorf("%q, %q, %v", r.key, r.value, err)
	}
}
