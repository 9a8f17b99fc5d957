"""Settings of the project; Celery's stand among them, in the namespace CELERY."""

import os

SECRET_KEY = "for tests"
USE_TZ = True
INSTALLED_APPS = ["celery_singleton_lock.django", "integration.site.ledger"]
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": os.environ["SITE_DATABASE"],
        "OPTIONS": {"timeout": 10},
    }
}
CACHES = {
    "default": {
        "BACKEND": "django.core.cache.backends.db.DatabaseCache",
        "LOCATION": "cache_table",
    },
    "locks": {
        "BACKEND": "django.core.cache.backends.redis.RedisCache",
        "LOCATION": os.environ["SITE_REDIS"],
        "OPTIONS": {"db": "1"},
    },
}

CELERY_BROKER_URL = os.environ["CELERY_BROKER_URL"]
CELERY_RESULT_BACKEND = os.environ["CELERY_RESULT_BACKEND"]
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True
CELERY_SINGLETON_LOCK_BACKEND = os.environ["SITE_LOCKS"]
CELERY_SINGLETON_LOCK_LEASE = 60
CELERY_SINGLETON_LOCK_PREFIX = "site"
CELERY_SINGLETON_LOCK_EAGER = True
