package objectstore

import (
	"context"
	"errors"
)

// CreateOwn is Create for an object that nothing else makes: its name is random, or has the hash of its content. So one that exists and has this
// content was made by this call: something before the target, such as a proxy, may send a request again whose answer it has lost, and return the answer
// to the second one.
func CreateOwn(ctx context.Context, s Store, name string, content Bytes) error {
	err := s.Create(ctx, name, content)
	if !errors.Is(err, ErrExists) {
		return err
	}
	return compare(ctx, s, name, content, err)
}
