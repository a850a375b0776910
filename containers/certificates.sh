#!/bin/sh
# Make what TLS needs, in /certificates: ca.pem, cert.pem and key.pem, for every service and for clients.
# The authority's own key is thrown away: nothing else will ever be signed by it.
#   certificates            # makes them where there are none, and says until when they hold
#   certificates --renew    # new ones, also where there are some; then start the services anew
set -eu
umask 077
cd "${EMTAU_CERTIFICATES:-/certificates}"
days=${EMTAU_CERTIFICATE_DAYS:-365}

if [ ! -e cert.pem ] || [ "${1:-}" = --renew ]; then
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    new_key="-newkey ec -pkeyopt ec_paramgen_curve:P-256 -noenc"
    openssl req -x509 $new_key -days "$days" -subj "/CN=emtau authority" \
        -addext keyUsage=critical,keyCertSign -keyout "$work/authority" -out "$work/ca.pem" 2> "$work/said" &&
    openssl req $new_key -subj "/CN=emtau" -keyout "$work/key.pem" -out "$work/request" 2> "$work/said" &&
    printf '%s\n' "subjectAltName=DNS:scheduler,DNS:localhost,IP:127.0.0.1" \
        "extendedKeyUsage=serverAuth,clientAuth" > "$work/extensions" &&
    openssl x509 -req -in "$work/request" -CA "$work/ca.pem" -CAkey "$work/authority" -CAcreateserial \
        -days "$days" -extfile "$work/extensions" -out "$work/cert.pem" 2> "$work/said" ||
    { cat "$work/said" >&2; exit 1; }
    rm -f ca.pem cert.pem key.pem
    cp "$work/ca.pem" "$work/key.pem" .
    chmod 400 ca.pem key.pem
    cp "$work/cert.pem" cert.pem    # last: where it is, all are
    chmod 400 cert.pem
fi
openssl x509 -in cert.pem -noout -enddate -checkend 86400 ||
    { echo "certificates: run this with --renew, then start the services anew" >&2; exit 1; }
