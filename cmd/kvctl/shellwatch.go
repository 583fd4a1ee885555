package main

import (
	"bufio"
	"cmp"
	"context"
	"fmt"
	"strconv"

	"github.com/epochkv/epochkv/client"
)

// watch prints changes until Ctrl-C, or until there were as many as the limit says.
func (s *statements) watch(words []string) error {
	if s.tx != nil {
		return errInTransaction
	}
	prefix, limit, err := s.watchWords(words)
	if err != nil {
		return err
	}
	o := client.WatchOptions{AfterTime: s.at.time}
	if s.at.epoch != 0 {
		o.After = &s.at.epoch
	}
	ctx, cancel := context.WithCancel(s.ctx)
	if i := s.app.interrupts; i != nil {
		ctx, cancel = i.until(s.ctx)
	}
	defer cancel()
	p := &changePrinter{app: s.app, w: bufio.NewWriterSize(s.app.out, 64<<10), format: s.app.formatOr(formatTable), o: &o, limit: limit}
	err = p.printAll(ctx, s.client.Watch(ctx, []client.Range{client.Prefix(prefix)}, o), func([]byte) error { return nil })
	return cmp.Or(err, s.ctx.Err()) // Ctrl-C ends the watch alone
}

func (s *statements) watchWords(words []string) (prefix []byte, limit int, err error) {
	if n := len(words); n >= 2 && words[n-2] == "limit" {
		if limit, err = strconv.Atoi(words[n-1]); err != nil || limit < 1 {
			return nil, 0, usageError{fmt.Errorf("limit %q: expected a number from 1 on", words[n-1])}
		}
		words = words[:n-2]
	}
	if len(words) > 1 {
		return nil, 0, usageError{fmt.Errorf("usage: %s", verbs["watch"].usage)}
	}
	if len(words) == 1 {
		prefix, err = s.app.bytesArg(words[0])
	}
	return prefix, limit, err
}
