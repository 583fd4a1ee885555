package main

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/epochkv/epochkv/client"
)

// pastUsage describes a flag that names a state of the past.
const pastUsage = "read the state at this `EPOCH|TIME` instead of the newest: " + momentForms

// momentForms are the forms of an epoch or a time.
const momentForms = "41, 10:32, 10:32:05, 2026-01-31T10:32:05Z, -5m"

// past is a state of the past: an epoch, or a time. The zero past is the newest state.
type past struct {
	epoch client.Epoch
	time  time.Time
	text  string
}

// beginning is a past that may also be epoch 0, the state before the first commit.
type beginning struct{ past }

// Set implements pflag.Value.
func (b *beginning) Set(text string) error {
	if epoch, err := strconv.ParseUint(text, 10, 64); err == nil && epoch == 0 {
		b.past = past{text: text}
		return nil
	}
	return b.past.Set(text)
}

// errEpochZero is an epoch that a program takes from a request that has written nothing. As a state to read, the server takes it for the newest.
var errEpochZero = errors.New("epoch 0 is no state: the first commit has epoch 1, and what wrote nothing has none")

// errTimeZero is what programs print for a time that they do not have.
var errTimeZero = errors.New("the first moment of the year 1 is no time: programs print it for a time that they do not have")

// notZero refuses the zero time, which would be taken for none: for the newest state, or for never.
func notZero(t time.Time) error {
	if t.IsZero() {
		return errTimeZero
	}
	return nil
}

// String implements pflag.Value.
func (p *past) String() string { return p.text }

// Type implements pflag.Value.
func (p *past) Type() string { return "epoch or time" }

// Set implements pflag.Value.
func (p *past) Set(text string) error {
	now := time.Now()
	*p = past{text: text}
	if epoch, err := strconv.ParseUint(text, 10, 64); err == nil {
		if epoch == 0 {
			return errEpochZero
		}
		p.epoch = client.Epoch(epoch)
		return nil
	}
	if ago, ok := strings.CutPrefix(text, "-"); ok {
		if d, err := time.ParseDuration(ago); err == nil && d >= 0 {
			p.time = now.Add(-d)
			return nil
		}
	}
	for _, layout := range []string{"15:04", time.TimeOnly} {
		if t, err := time.ParseInLocation(layout, text, time.Local); err == nil {
			p.time = time.Date(now.Year(), now.Month(), now.Day(), t.Hour(), t.Minute(), t.Second(), 0, time.Local)
			return nil
		}
	}
	for _, layout := range []string{time.RFC3339Nano, time.DateTime} {
		if t, err := time.ParseInLocation(layout, text, time.Local); err == nil {
			p.time = t
			return notZero(t)
		}
	}
	return fmt.Errorf("%q is no epoch and no time; expected 41, 10:32, 10:32:05, 2026-01-31T10:32:05Z or -5m", text)
}

func (p *past) moment() client.Moment { return client.Moment{Epoch: p.epoch, Time: p.time} }

// begin makes a transaction read-only, at the state.
func (p *past) begin() client.TxnOption {
	if !p.time.IsZero() {
		return client.ReadAtTime(p.time)
	}
	return client.ReadAt(p.epoch)
}

// option reads at the state.
func (p *past) option() client.ReadOption {
	if !p.time.IsZero() {
		return client.AtTime(p.time)
	}
	return client.At(p.epoch)
}
